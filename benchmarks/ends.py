"""SIGTERM at random moments with every store, discovery and dead mounts: `python -m benchmarks.ends [--runs 200]`.

Each run starts `kvproxy serve` with one of the setups below, opens a request that its engine never answers, and sends
SIGTERM: in every other run at a random moment of the start, else up to 3 s after it listens. It ended in time if it was
gone within `shutdown.drain` (1 s), the grace for what hangs (15 s; with workers theirs as well), that for threads (3 s)
and 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvproxy.operate.commands.last_resort import _THREADS_S, END_GRACE_S
from kvproxy.proxy.listener.server import serve
from tests.services.install import found as installed
from tests.support.fake_kubernetes import SLICES, FakeKubernetes, member, slice_of
from tests.support.ports import free_ports

DRAIN_S = 1.0
_MOMENTS_S = 3.0
#: A start that takes longer hangs.
_START_S = 60.0
LIMIT_S = DRAIN_S + END_GRACE_S + _THREADS_S + 1.0
#: Calls with a path below the folder hang as in a mount whose server is gone: no signal handler of Python runs there.
_DEAD_MOUNT = """
import builtins, ctypes, io, os
_libc = ctypes.CDLL(None)
def _hang():
    mutex = ctypes.create_string_buffer(64)
    _libc.pthread_mutex_lock(mutex)
    _libc.pthread_mutex_lock(mutex)
def _guarded(call):
    def guarded(path, *more, **named):
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(FOLDER):
            _hang()
        return call(path, *more, **named)
    return guarded
for _name in ("open", "stat", "lstat", "replace", "unlink", "listdir", "scandir", "mkdir"):
    setattr(os, _name, _guarded(getattr(os, _name)))
builtins.open = io.open = _guarded(io.open)
"""


@dataclass
class Setup:
    """Results of the runs with one configuration."""

    name: str
    config: dict[str, Any]
    took_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def limit_s(self) -> float:
        """Bound on the end: a supervisor waits for the end of its workers."""
        return LIMIT_S + (END_GRACE_S if "workers" in self.config else 0)

    @property
    def in_time(self) -> int:
        return sum(took_s <= self.limit_s for took_s in self.took_s)


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take a connection, and send nothing on it."""
    with suppress(OSError):
        while await reader.read(65536):
            pass
    writer.close()


@asynccontextmanager
async def program(*command: str, stopped: bool = False) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a server; with `stopped` it is halted once it listens."""
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null)
    try:
        await asyncio.sleep(3)
        if stopped:
            process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def setups(stack: AsyncExitStack, folder: Path) -> list[Setup]:
    """Every setup that this machine has the programs for, with its servers running."""
    silent_server = await stack.enter_async_context(await asyncio.start_server(_silent, "127.0.0.1", 0))
    silent = silent_server.sockets[0].getsockname()[1]
    found = [Setup(name, config) for name, config in without_programs(silent, folder).items()]
    kubernetes = FakeKubernetes()
    kubernetes.put(SLICES, slice_of("s1", member("b", "127.0.0.1")))
    api = await stack.enter_async_context(serve(kubernetes, drain_s=0.1))
    found.append(Setup("Kubernetes", kubernetes_at(api)))
    for name, (command, config) in with_programs(folder).items():
        server = installed(command[0])
        if server is None:
            print(f"left out, {command[0]} is not installed: {name}", file=sys.stderr)
            continue
        await stack.enter_async_context(program(server, *command[1:], stopped="halted" in name))
        found.append(Setup(name, config))
    for one in found:
        one.config = {"endpoints": {"a": f"http://127.0.0.1:{silent}"}, **one.config}
    return found


def kubernetes_at(url: str) -> dict[str, Any]:
    """Return the configuration of a discovery there."""
    return {"discovery": {"kubernetes": {"service": "vllm", "namespace": "models", "api": {"url": url}}}}


def with_programs(folder: Path) -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """Return stores that are programs of their own: the command and kvproxy's settings for it."""
    redis, halted, valkey, nats, etcd, etcd_peer = free_ports(6)
    options = ("--save", "", "--dir", str(folder), "--port")
    redis_server = ("redis-server", *options)
    etcd_url = f"http://127.0.0.1:{etcd}"
    etcd_server: tuple[str, ...] = (
        "etcd",
        "--data-dir",
        str(folder / "etcd"),
        "--listen-peer-urls",
        f"http://127.0.0.1:{etcd_peer}",
    )
    etcd_server += ("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url)
    return {
        "Redis": ((*redis_server, str(redis)), {"sync": {"redis": f"redis://127.0.0.1:{redis}"}}),
        "Redis, halted": ((*redis_server, str(halted)), {"sync": {"redis": f"redis://127.0.0.1:{halted}"}}),
        "Valkey": (("valkey-server", *options, str(valkey)), {"sync": {"redis": f"redis://127.0.0.1:{valkey}"}}),
        "NATS": (("nats-server", "-p", str(nats)), {"sync": {"nats": f"nats://127.0.0.1:{nats}"}}),
        "etcd": (etcd_server, {"discovery": {"etcd": {"urls": [etcd_url], "prefix": "/e/"}}}),
    }


def without_programs(silent: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Setups by name; `silent` is a port that takes connections and never answers."""
    (dead,) = free_ports(1)
    dead_mount = folder / "dead"
    file = folder / "endpoints.yaml"
    file.write_text(f"b: http://127.0.0.1:{silent}\n")
    silent_redis = {"redis": f"redis://127.0.0.1:{silent}"}
    return {
        "endpoints file": {"discovery": {"file": {"path": str(file)}}},
        "DNS": {"discovery": {"dns": {"host": "localhost", "port": silent}}},
        "DNS, unknown name": {"discovery": {"dns": {"host": "nowhere.invalid", "port": silent}}},
        "Kubernetes that never answers": kubernetes_at(f"http://127.0.0.1:{silent}"),
        "etcd that never answers": {"discovery": {"etcd": {"urls": [f"http://127.0.0.1:{silent}"], "prefix": "/e/"}}},
        "Redis that never answers": {"sync": silent_redis},
        "Redis, refused": {"sync": {"redis": f"redis://127.0.0.1:{dead}"}},
        "NATS that never answers": {"sync": {"nats": f"nats://127.0.0.1:{silent}"}},
        "endpoints file on a dead mount": {"discovery": {"file": {"path": str(dead_mount / "endpoints.yaml")}}},
        "snapshot on a dead mount": {"filters": {"kvcache": {"snapshot": {"path": str(dead_mount / "snapshot")}}}},
        "receipts on a dead mount": {"receipts": {"path": str(dead_mount / "receipts")}},
        "ledger on a dead mount": {"ledger": {"path": str(dead_mount / "ledger")}},
        "two workers": {"workers": 2},
        "two workers, Redis that never answers": {"workers": 2, "sync": silent_redis},
    }


async def one_run(one: Setup, folder: Path, moment_s: float, *, listens: bool) -> None:
    """Start a proxy, send SIGTERM so long after its start, or after it listens, and note how long the end took."""
    port, admin = free_ports(2)
    path = folder / f"{port}.json"
    listeners = {"listen": f"127.0.0.1:{port}", "admin": {"port": admin}}
    path.write_text(json.dumps({**one.config, **listeners, "shutdown": {"drain": DRAIN_S, "idle": 0.5}}))
    environment = {**os.environ, "PYTHONPATH": str(folder / "dead_mount")}
    with (folder / f"{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvproxy", "serve", "--config", str(path)),
            stdout=log,
            stderr=log,
            env=environment,
        )
        open_one = asyncio.Event()
        client = asyncio.create_task(_wait_for_an_answer(port, open_one))
        if listens:
            with suppress(TimeoutError):  # a start that hangs
                await asyncio.wait_for(open_one.wait(), _START_S)
        await asyncio.sleep(moment_s)
        began = time.monotonic()
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 3 * LIMIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    one.took_s.append(time.monotonic() - began)
    one.statuses[str(process.returncode)] += 1
    if one.took_s[-1] > one.limit_s:
        print(f"{one.name}: {one.took_s[-1]:.1f} s, {folder / f'{port}.log'}", file=sys.stderr)


async def _wait_for_an_answer(port: int, connected: asyncio.Event) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connected.set()
            writer.write(head % len(body) + body)
            await reader.read()
            writer.close()
        await asyncio.sleep(0.1)


async def start_s(one: Setup, folder: Path) -> float:
    """Measure how long a start takes on this machine, now."""
    port, admin = free_ports(2)
    path = folder / "first.json"
    path.write_text(json.dumps({**one.config, "listen": f"127.0.0.1:{port}", "admin": {"port": admin}}))
    began = time.monotonic()
    null = asyncio.subprocess.DEVNULL
    command = (sys.executable, "-m", "kvproxy", "serve", "--config", str(path))
    process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null)
    while process.returncode is None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        await asyncio.sleep(0.05)
    took_s = time.monotonic() - began
    process.terminate()
    await process.wait()
    return took_s


async def run(runs: int, at_once: int, seed: int) -> list[Setup]:
    """All runs, over the setups in turn, some at once."""
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (folder / "dead_mount").mkdir()
        hook = f"FOLDER = {str(folder / 'dead')!r} + '/'\n{_DEAD_MOUNT}"
        (folder / "dead_mount" / "sitecustomize.py").write_text(hook)
        found = await setups(stack, folder)
        turns = asyncio.Semaphore(at_once)
        start = await start_s(next(one for one in found if one.name == "endpoints file"), folder)
        print(f"a start takes {start:.1f} s", file=sys.stderr)

        async def next_run(number: int) -> None:
            async with turns:
                listens = number // len(found) % 2 == 1
                moment_s = rng.uniform(0, _MOMENTS_S if listens else at_once * start)
                await one_run(found[number % len(found)], folder, moment_s, listens=listens)
                print(f"{number + 1} of {runs}", file=sys.stderr, flush=True)

        await asyncio.gather(*(next_run(number) for number in range(runs)))
    return found


def report(found: list[Setup], seed: int) -> str:
    """Return the results as Markdown."""
    total = sum(len(one.took_s) for one in found)
    in_time = sum(one.in_time for one in found)
    lines = [
        "# Ends",
        "",
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        "",
        f"**{in_time} of {total} ended in time** (within {LIMIT_S:.0f} s, with workers {LIMIT_S + END_GRACE_S:.0f};",
        f"seed {seed}). Exit status -15: a SIGTERM before the process handles signals; 1: it gave up what hung.",
        "",
        "| setup | runs | in time | median s | longest s | exit statuses |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        took_s = sorted(one.took_s)
        if took_s:
            statuses = ", ".join(f"{count} x {status}" for status, count in sorted(one.statuses.items()))
            middle = took_s[len(took_s) // 2]
            lines.append(
                f"| {one.name} | {len(took_s)} | {one.in_time} | {middle:.1f} | {took_s[-1]:.1f} | {statuses} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = asyncio.run(run(options.runs, options.at_once, options.seed))
    sys.stdout.write(report(found, options.seed))


if __name__ == "__main__":
    main()
