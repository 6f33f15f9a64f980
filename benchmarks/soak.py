"""Half an hour of mixed load with faults: does every counter come back to zero, does memory reach a plateau?

`python -m benchmarks.soak [--minutes 30] [--rate 25] [--out FOLDER]`. Three simulated engines with KV events and
LMCache's controller, kvproxy with everything on. Clients chat, stream, leave in the middle, upload slowly, send
nonsense and hostile bodies; every few seconds an engine gets a fault, is stopped for a while, or is killed and started
again. Writes soak.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.report import machine
from benchmarks.soak_engines import MODEL
from tests.support.ports import free_ports

CHAT = "/v1/chat/completions"
#: One of these every FAULT_EVERY_S, at one engine; what it had before is taken back.
FAULTS: tuple[dict[str, Any], ...] = (
    {"stall_first_byte_s": 6.0},
    {"stall_mid_stream_s": 4.0},
    {"stall_head_s": 5.0},
    {"fail_next": 5},
    {"busy_next": 5},
    {"cut_next": 3},
    {"error_next": 3},
    {"engine_dead": True},
    {"slow_tokenize_s": 1.0},
    {"lose_events": 3},
    {"repeat_events": 3},
    {},
)
FAULT_EVERY_S = 7.0
SAMPLE_EVERY_S = 15.0
SETTLE_S = 45.0
#: How long nothing runs before memory is looked at for the last time: a quiet process trims its heap once a minute.
REST_S = 90.0
#: Counters that tell what the proxy did about the faults.
TOLD = re.compile(
    r"^kvproxy_(local_replies|retries|retries_refused|attempt_failures|request_ends|kv_event_batches)_total\{"
)
#: What the proxy says that it keeps on purpose: indexes, token memory, bodies.
HELD = re.compile(r"^kvproxy_(kvcache_index_bytes|kvcache_token_memory_bytes|bodies_held_bytes)")
#: Gauges that must be zero once the load has ended and the engines are well again.
ZERO = re.compile(
    r"^(kvproxy_in_flight(?:_requests)?|kvproxy_pending_prompt_tokens|kvproxy_resident_tokens|kvproxy_bodies_held_bytes"
    r'|kvproxy_queue_depth\{queue="(?:upstream|kvcache_lookups|kvcache_background|picks)[^"]*")'
)


@dataclass
class Sample:
    """The proxy process at one moment."""

    minute: float
    rss_mb: float
    held_mb: float
    fds: int
    threads: int
    requests: int


@dataclass
class Soak:
    """Processes of a soak, and its results."""

    ports: list[int]
    listen: int
    admin: int
    controller: int
    folder: Path
    rate: float
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    answers: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    samples: list[Sample] = field(default_factory=list)
    rested: list[Sample] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The public listener."""
        return f"http://127.0.0.1:{self.listen}"

    def start(self, name: str, *command: str) -> None:
        """Start a child process with its output in a file of its name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)

    def start_engines(self) -> None:
        """Two engines and the controller in one process, the one that will be stopped and killed in another."""
        first = [str(port) for port in self.ports[:2]]
        self.start("engines", "benchmarks.soak_engines", "--controller", str(self.controller), *first)
        self.start("victim", "benchmarks.soak_engines", str(self.ports[2]))

    def end(self) -> None:
        """Every child, by its id."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()

    def configuration(self) -> str:
        """Everything on."""
        cache = {
            "kv_events": True,
            "lmcache_endpoint": f"http://127.0.0.1:{self.controller}",
            "token_cache": {"max_bytes": "8MiB"},
            "cache_strategy": {"enable_pinning": True, "enable_compression": True, "enable_eviction": True},
        }
        return yaml.safe_dump(
            {
                "listen": f"127.0.0.1:{self.listen}",
                "admin": f"127.0.0.1:{self.admin}",
                "policy": "kv_aware",
                "queue": {},
                "endpoints": {f"e{port}": f"http://127.0.0.1:{port}" for port in self.ports},
                "timeouts": {"first_byte": "20s", "idle": "20s"},
                "limits": {"body_timeout": "5s"},
                "filters": ["request_id", "access_log", "inference_request", {"kvcache": cache}, "router"],
                "receipts": {"path": str(self.folder / "receipts.jsonl"), "max_file": "8MiB"},
            }
        )


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(("lorem", "ipsum", "dolor", "sit", "amet", "cache", "prefix", "token"), k=count))


class Clients:
    """The load: each method is one exchange and names how it ended."""

    def __init__(self, soak: Soak, client: httpx.AsyncClient) -> None:
        self._soak = soak
        self._client = client
        self._rng = soak.rng
        self._chats = [[{"role": "system", "content": _words(soak.rng, 200)}] for _ in range(12)]
        self.kinds: list[tuple[Callable[[], Coroutine[Any, Any, str]], int]] = [
            (self.turn, 40),
            (self.unary, 25),
            (self.long_prompt, 6),
            (self.leave, 12),
            (self.tokens, 4),
            (self.nonsense, 4),
            (self.many_parts, 2),
            (self.long_name, 3),
            (self.upload, 4),
            (self.elsewhere, 4),
        ]

    async def one(self) -> None:
        """One of them, by weight."""
        kinds, weights = zip(*self.kinds, strict=True)
        exchange = self._rng.choices(kinds, weights)[0]
        try:
            async with asyncio.timeout(60):
                ended = await exchange()
        except TimeoutError:
            ended = "client timeout"
        except httpx.HTTPError as error:
            ended = type(error).__name__
        self._soak.answers[f"{exchange.__name__}: {ended}"] += 1

    async def turn(self) -> str:
        """Add a turn to a chat, streamed."""
        chat = self._rng.choice(self._chats)
        chat.append({"role": "user", "content": _words(self._rng, 60)})
        if len(chat) > 24:
            del chat[1:]
        return await self._stream({"messages": list(chat)})

    async def unary(self) -> str:
        """Send a chat without a stream."""
        chat = self._rng.choice(self._chats)
        answer = await self._client.post(CHAT, json={"model": MODEL, "messages": chat[:3], "max_tokens": 8})
        return str(answer.status_code)

    async def long_prompt(self) -> str:
        """100 KB that were never sent before."""
        return await self._stream({"messages": [{"role": "user", "content": _words(self._rng, 4000)}]})

    async def leave(self) -> str:
        """Close the connection before the first byte or in the middle."""
        body = {"model": MODEL, "stream": True, "max_tokens": 64, "messages": self._rng.choice(self._chats)[:2]}
        stop_after = self._rng.choice((0, 1, 3))
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(self._rng.uniform(0.01, 0.6)),
                self._client.stream("POST", CHAT, json=body) as got,
            ):
                pieces = 0
                async for _ in got.aiter_raw():
                    pieces += 1
                    if pieces > stop_after:
                        break
        return "left"

    async def tokens(self) -> str:
        """Send a completion of token ids."""
        ids = [self._rng.randrange(1000) for _ in range(600)]
        answer = await self._client.post("/v1/completions", json={"model": MODEL, "prompt": ids, "max_tokens": 4})
        return str(answer.status_code)

    async def nonsense(self) -> str:
        """Bodies an engine refuses."""
        body = self._rng.choice((b"{", b'{"messages": NaN}', b"\xff\xfe", b"[]", b'{"model": 3, "messages": "x"}'))
        answer = await self._client.post(CHAT, content=body, headers={"content-type": "application/json"})
        return str(answer.status_code)

    async def many_parts(self) -> str:
        """Send a million tiny messages."""
        body = b'{"model": "sim", "messages": [' + b"1," * 999_999 + b"1]}"
        answer = await self._client.post(CHAT, content=body, headers={"content-type": "application/json"})
        return str(answer.status_code)

    async def long_name(self) -> str:
        """Send a model name of 1 MB, another one each time."""
        name = f"{self._rng.random()}" + "x" * 1_000_000
        answer = await self._client.post(CHAT, json={"model": name, "messages": [{"role": "user", "content": "hi"}]})
        return str(answer.status_code)

    async def upload(self) -> str:
        """Send an upload that never ends."""

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 1000
                await asyncio.sleep(0.5)

        answer = await self._client.post("/v1/audio/transcriptions", content=pieces())
        return str(answer.status_code)

    async def elsewhere(self) -> str:
        """Other paths."""
        path = self._rng.choice(("/v1/models", "/", "/metrics", "/sleep", "/v1/../sleep", "/tokenize"))
        answer = await self._client.get(path)
        return str(answer.status_code)

    async def _stream(self, body: dict[str, Any]) -> str:
        asked = {"model": MODEL, "stream": True, "max_tokens": 16, **body}
        async with self._client.stream("POST", CHAT, json=asked) as got:
            text = b"".join([piece async for piece in got.aiter_raw()])
        broken = got.status_code == 200 and b'"error"' in text
        return f"{got.status_code}{' error event' if broken else ''}"


async def load(soak: Soak, until: float) -> None:
    """Exchanges at the rate, at most 200 at once; returns when all have ended."""
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=20)
    async with httpx.AsyncClient(base_url=soak.url, timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
        clients, running = Clients(soak, client), set[asyncio.Task[None]]()
        while time.monotonic() < until:
            if len(running) < 200:
                task = group.create_task(clients.one())
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(soak.rng.expovariate(soak.rate))


async def disturb(soak: Soak, until: float) -> None:
    """Faults by turns; the victim is stopped for 5 s, or killed and started again."""
    async with httpx.AsyncClient(timeout=3) as client:
        while time.monotonic() < until:
            soak.faults += 1
            await _faults(client, soak.rng.choice(soak.ports), soak.rng.choice(FAULTS))
            kind = soak.rng.random()
            victim = soak.processes["victim"]
            if kind < 0.08:
                victim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(5)
                victim.send_signal(signal.SIGCONT)
            elif kind < 0.14:
                victim.kill()
                victim.wait()
                await asyncio.sleep(2)
                soak.start("victim", "benchmarks.soak_engines", str(soak.ports[2]))
            await asyncio.sleep(FAULT_EVERY_S)
        for port in soak.ports:
            await _faults(client, port, {})


async def _faults(client: httpx.AsyncClient, port: int, faults: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await client.post(f"http://127.0.0.1:{port}/sim/faults", json={"reset": True, **faults})


async def watch(soak: Soak, until: float, samples: list[Sample]) -> None:
    """Record memory, the part of it that the proxy reports as held, descriptors and threads."""
    process, began = psutil.Process(soak.processes["proxy"].pid), time.monotonic()
    async with httpx.AsyncClient(timeout=10) as client:
        while time.monotonic() < until:
            await asyncio.sleep(SAMPLE_EVERY_S)
            page = (await client.get(f"http://127.0.0.1:{soak.admin}/metrics")).text
            held = sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if HELD.match(line))
            samples.append(
                Sample(
                    (time.monotonic() - began) / 60,
                    process.memory_info().rss / 1e6,
                    held / 1e6,
                    process.num_fds(),
                    process.num_threads(),
                    soak.answers.total(),
                )
            )


async def left_over(soak: Soak) -> dict[str, float]:
    """Gauges that are not zero although nothing runs any more; looked at until none is, at most SETTLE_S."""
    end, left = time.monotonic() + SETTLE_S, {"/metrics": 1.0}
    async with httpx.AsyncClient(timeout=10) as client:
        while left and time.monotonic() < end:
            await asyncio.sleep(1)
            page = (await client.get(f"http://127.0.0.1:{soak.admin}/metrics")).text
            told = (line.rsplit(" ", 1) for line in page.splitlines() if TOLD.match(line))
            soak.counters = {name: float(value) for name, value in told if float(value)}
            values = (line.rsplit(" ", 1) for line in page.splitlines() if ZERO.match(line))
            left = {name: float(value) for name, value in values if float(value)}
    return left


async def wait_ready(soak: Soak) -> None:
    """Until a chat is answered."""
    async with httpx.AsyncClient(timeout=5) as client:
        for _ in range(120):
            with contextlib.suppress(httpx.HTTPError):
                body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
                if (await client.post(soak.url + CHAT, json=body)).status_code == 200:
                    return
            await asyncio.sleep(0.5)
    raise SystemExit(f"the proxy never answered: {(soak.folder / 'proxy.log').read_text()[-2000:]}")


async def run(soak: Soak, minutes: float) -> dict[str, float]:
    """Run the whole soak; returns gauges that were left over."""
    await wait_ready(soak)
    until = time.monotonic() + 60 * minutes
    await asyncio.gather(load(soak, until), disturb(soak, until), watch(soak, until, soak.samples))
    left = await left_over(soak)
    await watch(soak, time.monotonic() + REST_S, soak.rested)
    return left


def quarters(samples: list[Sample]) -> list[float]:
    """Return the median memory of each quarter of the run, in MB."""
    ends = [len(samples) * quarter // 4 for quarter in range(5)]
    return [median(one.rss_mb for one in samples[begin:end]) for begin, end in pairwise(ends) if end > begin]


def report(soak: Soak, left: dict[str, float], about: dict[str, str]) -> str:
    """soak.md."""
    lines = ["# Soak", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [f"{soak.answers.total()} exchanges, {soak.faults} faults.", "", "## Left over when nothing runs", ""]
    lines += [f"- `{name}`: {value:g}" for name, value in left.items()] or ["Nothing: every counter is back at zero."]
    medians = ", ".join(f"{one:.0f}" for one in quarters(soak.samples))
    lines += [
        "",
        "## The process",
        "",
        f"Median MB of each quarter of the run: {medians}.",
        f"At rest, {REST_S:g} s after the last request: {soak.rested[-1].rss_mb:.0f} MB.",
        "Held: what its own metrics say that indexes, token memory and request bodies take of it.",
        "",
    ]
    lines += ["| minute | MB | held | descriptors | threads | exchanges |", "|---|---|---|---|---|---|"]
    step = max(1, len(soak.samples) // 30)
    lines += [
        f"| {one.minute:.1f} | {one.rss_mb:.0f} | {one.held_mb:.1f} | {one.fds} | {one.threads} | {one.requests} |"
        for one in soak.samples[step - 1 :: step]
    ]
    lines += ["", "## How exchanges ended", "", "| exchange | times |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(soak.answers.items())]
    lines += ["", "## What the proxy counted", "", "| counter | |", "|---|---|"]
    lines += [f"| `{name.replace('|', ' ')}` | {value:g} |" for name, value in sorted(soak.counters.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run it, write the report; 0 when nothing was left over and no error was logged with its stack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=25.0, help="exchanges a second")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    arguments = parser.parse_args()
    about = machine(psutil.cpu_count() or 1, f"python -m benchmarks.soak --minutes {arguments.minutes:g}")
    with tempfile.TemporaryDirectory() as folder:
        *ports, listen, admin, controller = free_ports(6)
        soak = Soak(ports, listen, admin, controller, Path(folder), arguments.rate)
        try:
            soak.start_engines()
            (soak.folder / "config.yaml").write_text(soak.configuration())
            soak.start("proxy", "kvproxy", "serve", "-c", str(soak.folder / "config.yaml"))
            left = asyncio.run(run(soak, arguments.minutes))
        finally:
            if "proxy" in soak.processes and (code := soak.processes["proxy"].poll()) is not None:
                print(f"the proxy ended with {code}; the end of its log:")
                print((soak.folder / "proxy.log").read_text(errors="replace")[-20_000:])
            soak.end()
        log = (soak.folder / "proxy.log").read_text(errors="replace")
    text = report(soak, left, about) + f"\nTracebacks in the log: {log.count('Traceback')}.\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "soak.md").write_text(text)
    print(text)
    if "Traceback" in log:
        print(json.dumps(log[log.index("Traceback") :][:3000]))
    return 1 if left or "Traceback" in log else 0


if __name__ == "__main__":
    sys.exit(main())
