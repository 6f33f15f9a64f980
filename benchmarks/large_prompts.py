"""Cores that a proxy needs for 3,000 requests a second with prompts of 50,000 to 100,000 tokens, half of them streamed.

`python -m benchmarks.large_prompts [--requests N] [--rounds N] [--only NAME...] [--out FOLDER]`: kvproxy beside LiteLLM
(`python -m benchmarks.peers` installs it) in one run, in turn. Every prompt is another one: `first sight` shares a
system prompt of a twentieth with the others, `next turn` goes on from one that was sent before. Writes
large-prompts.md."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import load, peers
from benchmarks.data_plane import PROBE, Target, _start, stub_engines
from benchmarks.stub import EVENTS

SIZES = (50_000, 75_000, 100_000)
SHAPES = ("first sight", "next turn")
BYTES_PER_TOKEN = 4
RATE = 3000
PUBLISHED = 132
TURN_TOKENS = 500
_MESSAGE_BYTES = 2048
_CLIENTS = 4

ABOUT = """\
# Large prompts

`{command}`, kvproxy {revision}, LiteLLM {litellm}. CPU of the proxy's processes (their own clocks, so that other load
on the machine counts little) for whole requests; engines are stubs that answer at once, half of the answers are streams
of {events} events. {token} bytes make a token, {requests} requests a cell and round, {rounds} rounds in turn, medians.
Every prompt is another one, in messages of {message} bytes: `first sight` shares a system prompt of a twentieth with
the others; `next turn` adds {turn} tokens to a prompt that was sent before. `kv_aware` matches every prompt against the
engines' caches; LiteLLM picks at random.

| tokens | shape | proxy | whole, ms of CPU | stream, ms of CPU | requests a second and core | cores for {rate:,} |
|---|---|---|---|---|---|---|
"""

CAVEATS = f"""
LiteLLM's publication names {PUBLISHED} vCPU for {RATE:,} requests a second of 50,000 to 100,000 tokens: other
processors, and a deployment whose features are not known here; this run has the proxy alone, without database, keys and
callbacks. Proxies, engines and clients share two cores with other programs: caches are colder and kernel time is higher
than on a quiet machine, for all alike, so that ratios are worth more than the numbers. No TLS; the kernel's work on
sockets is in it. `kv_aware` runs without KV events, LMCache and an admin listener. The stub's streams report no usage;
that LiteLLM counts the tokens of their prompts itself would explain what its streams cost here (not verified), so judge
it by its whole answers, which do report usage.
"""


class Prompts:
    """Bodies of sessions that share a system prompt."""

    def __init__(self, tokens: int, shape: str, *, seed: int) -> None:
        self._rng = random.Random(seed)
        self._bytes = tokens * BYTES_PER_TOKEN
        self._shape = shape
        self._system = self._text(self._bytes // 20)

    def pairs(self, count: int, *, stream: bool) -> Iterator[tuple[bytes | None, bytes]]:
        """Yield what is sent before, if anything, and what is measured."""
        for _ in range(count):
            messages = [{"role": "system", "content": self._system}]
            left = self._bytes - len(self._system)
            while left > 0:
                role = "assistant" if len(messages) % 2 == 0 else "user"
                messages.append({"role": role, "content": self._text(min(left, _MESSAGE_BYTES))})
                left -= _MESSAGE_BYTES
            before = self._body(messages, stream=stream)
            if self._shape == SHAPES[0]:
                yield None, before
            else:
                turn = self._text(TURN_TOKENS * BYTES_PER_TOKEN // 2)
                grown = [*messages, {"role": "assistant", "content": turn}, {"role": "user", "content": turn}]
                yield before, self._body(grown, stream=stream)

    def _text(self, size: int) -> str:
        return self._rng.randbytes((size + 1) // 2).hex()[:size]

    def _body(self, messages: Sequence[dict[str, str]], *, stream: bool) -> bytes:
        return json.dumps({"model": "bench", "stream": stream, "messages": messages}, separators=(",", ":")).encode()


def send_all(port: int, bodies: Sequence[bytes]) -> None:
    """Send each once, a few at a time, and read the answers whole. Raises RuntimeError for one that is not 200."""

    def send(mine: Sequence[bytes]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        for body in mine:
            connection.request("POST", load.PATH, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {text[:200]!r}")
        connection.close()

    with ThreadPoolExecutor(_CLIENTS) as pool:
        for done in [pool.submit(send, bodies[number::_CLIENTS]) for number in range(_CLIENTS)]:
            done.result()


def measure(target: Target, tokens: int, shape: str, *, stream: bool, requests: int, seed: int) -> float:
    """Milliseconds of CPU of one request."""
    assert target.process is not None
    pairs = list(Prompts(tokens, shape, seed=seed).pairs(requests, stream=stream))
    send_all(target.port, [before for before, _ in pairs if before is not None])
    began_s = target.process.cpu_s()
    send_all(target.port, [body for _, body in pairs])
    return 1e3 * (target.process.cpu_s() - began_s) / requests


def rows(targets: Sequence[Target], *, requests: int, rounds: int) -> Iterator[str]:
    """Yield the lines of the table."""
    for tokens in SIZES:
        for shape in SHAPES:
            taken: dict[tuple[str, bool], list[float]] = {}
            for number in range(rounds):
                for stream in (False, True):
                    for target in targets:
                        ms = measure(target, tokens, shape, stream=stream, requests=requests, seed=number)
                        taken.setdefault((target.name, stream), []).append(ms)
                        print(f"{tokens} {shape} {target.name} stream={stream}: {ms:.2f} ms", flush=True)
            for target in targets:
                whole, stream_ms = (statistics.median(taken[target.name, stream]) for stream in (False, True))
                mean = 0.5 * (whole + stream_ms)
                cells = f"{whole:.2f} | {stream_ms:.2f} | {1e3 / mean:.0f} | {RATE * mean / 1e3:.1f}"
                yield f"| {tokens:,} | {shape} | {target.name} | {cells} |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["kvproxy", "litellm"])
    parser.add_argument("--revision", default="", help="of this checkout, for the report")
    parser.add_argument("--litellm", default="", help="version of LiteLLM, for the report")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = stub_engines(stack, folder, core=1)
        engines = (f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
        targets = []
        for peer in peers.peers(peers.KVPROXY, policies=("round_robin", "kv_aware")):
            if any(peer.name.startswith(name) for name in options.only):
                target, problem = _start(peer, engines, folder, stack)
                if target is None:
                    raise SystemExit(f"{peer.name}: {problem}")
                send_all(target.port, [PROBE.body()] * 20)
                targets.append(target)
        table = list(rows(targets, requests=options.requests, rounds=options.rounds))
    command = f"python -m benchmarks.large_prompts --requests {options.requests} --rounds {options.rounds}"
    about = ABOUT.format(
        command=command,
        revision=options.revision,
        litellm=options.litellm,
        requests=options.requests,
        rounds=options.rounds,
        events=EVENTS,
        token=BYTES_PER_TOKEN,
        message=_MESSAGE_BYTES,
        turn=TURN_TOKENS,
        rate=RATE,
    )
    text = about + "\n".join(table) + "\n" + CAVEATS
    (options.out / "large-prompts.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
