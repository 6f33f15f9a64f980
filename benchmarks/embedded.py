"""kvproxy in other people's processes: what a transport and the middleware cost.

httpx clients go straight to one engine, through `kvproxy serve`, and by a transport that routes over two engines.

    python -m benchmarks.embedded [--requests N] [--rounds N] > benchmarks/reports/embedded.md
    python -m benchmarks.embedded --traces >> benchmarks/reports/embedded.md

The three take turns in one process, round by round; stub engines and the proxy have processes of their own. Traces
(benchmarks/small_traces.py) are played to simulated engines in virtual time, through the proxy and by the transport:
where each request went is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

import kvproxy
from benchmarks import virtual
from benchmarks.markdown import table
from benchmarks.processes import Process
from benchmarks.small_traces import MODEL, TRACES, Ask, play, serve_engines, summarize
from kvproxy.lab.replay.trace import Trace
from kvproxy.proxy.listener.server import Server
from tests.support.ports import free_ports

STRAIGHT = "httpx to one engine"
SERVED = "through kvproxy serve"
INSIDE = "kvproxy.AsyncTransport"
PATH = "/v1/chat/completions"
#: The most between arrivals at one moment.
_APART_S = 1e-3
#: Size, whether it streams, and its messages.
CASES = {
    "2 KB": (2_048, False, 1),
    "64 KB": (65_536, False, 1),
    "64 KB in 16 messages": (65_536, False, 16),
    "2 KB, stream of 64 events": (2_048, True, 1),
}


@dataclass
class Taken:
    """Times of one kind of client, by round."""

    p50_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def body_of(size: int, *, stream: bool, session: int, messages: int = 1) -> bytes:
    """Return a chat of this size whose session has its own beginning."""
    content = "water river mountain answer " * (size // messages // 28)
    talk = [{"role": "user", "content": f"session {session}, {number} {content}"} for number in range(messages)]
    return json.dumps({"model": "bench", "stream": stream, "messages": talk}).encode()


async def run(client: httpx.AsyncClient, url: str, *, requests: int, case: str) -> tuple[float, float]:
    """Median time of a request and the CPU of this process for one, in microseconds."""
    taken = []
    size, stream, messages = CASES[case]
    bodies = [body_of(size, stream=stream, session=session, messages=messages) for session in range(8)]
    headers = {"content-type": "application/json"}
    began = time.process_time()
    for number in range(requests):
        start = time.perf_counter()
        async with client.stream("POST", url + PATH, content=bodies[number % 8], headers=headers) as answer:
            async for _ in answer.aiter_raw():
                pass
        assert answer.status_code == 200
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6, (time.process_time() - began) / requests * 1e6


async def measure(
    urls: Mapping[str, str], engines: Mapping[str, str], *, requests: int, rounds: int
) -> dict[str, dict[str, Taken]]:
    """Take turns; the first round of each case is not counted."""
    found: dict[str, dict[str, Taken]] = {case: {name: Taken() for name in urls} for case in CASES}
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints=engines) if name == INSIDE else None)
            )
            for name in urls
        }
        for case in CASES:
            for number in range(rounds + 1):
                for name, client in clients.items():
                    p50, cpu = await run(client, urls[name], requests=requests, case=case)
                    if number:
                        found[case][name].p50_us.append(p50)
                        found[case][name].cpu_us.append(cpu)
    return found


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body and answer."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def _calls_us(app: ASGIApp, path: str, body: bytes, *, calls: int) -> float:
    """Microseconds of CPU for a call."""
    message = {"type": "http.request", "body": body, "more_body": False}

    async def receive() -> Any:
        return message

    async def send(_: Any) -> None:
        return

    began = time.process_time()
    for _ in range(calls):
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        await app(scope, receive, send)
    return (time.process_time() - began) / calls * 1e6


async def measure_middleware(*, rounds: int) -> dict[str, float]:
    """Microseconds that the middleware adds, by kind of request: the median of the rounds."""
    wrapped = kvproxy.KVCacheMiddleware(_answer, endpoints={"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"})
    kinds = {
        "a route that is not ours": ("/health", b"{}", 20_000),
        "a chat of 1 KB": (PATH, body_of(1_024, stream=False, session=0), 2_000),
    }
    added: dict[str, list[float]] = {kind: [] for kind in kinds}
    async with wrapped:
        for _ in range(rounds + 1):
            for kind, (path, body, calls) in kinds.items():
                bare = await _calls_us(_answer, path, body, calls=calls)
                added[kind].append(await _calls_us(wrapped, path, body, calls=calls) - bare)
    return {kind: statistics.median(values[1:]) for kind, values in added.items()}


def spread_ties(trace: Trace, seed: int) -> Trace:
    """Return the trace with sessions that begin at one moment, whose order is left to chance otherwise, a little apart
    in an order by the seed."""
    draws = random.Random(seed)
    sessions = (replace(each, start_s=each.start_s + draws.uniform(0, _APART_S)) for each in trace.sessions)
    return replace(trace, sessions=tuple(sessions))


async def play_trace(name: str, *, served: bool, seed: int) -> dict[str, Any]:
    """Play a small trace through a proxy that listens, or by the transport; `placed` has the endpoints of each
    session's turns."""
    small = TRACES[name]
    placed: dict[str, list[str]] = {}
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(serve_engines(small))
        proxy = await stack.enter_async_context(kvproxy.Proxy({"endpoints": engines}, rng=random.Random(seed)))
        transport = None if served else kvproxy.AsyncTransport(proxy)
        base_url = "http://engines"
        if served:
            base_url = (await stack.enter_async_context(Server(proxy, drain_s=0.5))).url
        http = httpx.AsyncClient(
            transport=transport, base_url=base_url, timeout=600, limits=httpx.Limits(max_connections=None)
        )
        client = await stack.enter_async_context(http)

        async def send(ask: Ask) -> None:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": ask.prompt}],
                "max_tokens": ask.output_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with client.stream("POST", PATH, json=body) as answer:
                answer.raise_for_status()
                placed.setdefault(ask.session, []).append(answer.headers["x-kvproxy-endpoint"])
                async for line in answer.aiter_lines():
                    _read_event(line, ask)

        return {**summarize(await play(spread_ties(small.read(), seed), send)), "placed": placed}


def _read_event(line: str, ask: Ask) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if event["choices"] and event["choices"][0]["delta"].get("content"):
        ask.first_token()
    if event.get("usage"):
        ask.read_usage(event["usage"])


def play_traces(seeds: int) -> list[str]:
    """Return the table of all of them, each played in processes of its own with the same draws for ties."""
    rows = []
    for name in TRACES:
        for seed in range(seeds):
            served, inside = (_play_alone(name, how, seed) for how in ("served", "inside"))
            turns = [
                there == here
                for session, endpoints in served["placed"].items()
                for there, here in zip(endpoints, inside["placed"][session], strict=True)
            ]
            rows.append(
                [
                    name,
                    str(seed),
                    f"{sum(turns)} of {len(turns)}",
                    *(f"{run['ttft_s']:.4f}" for run in (served, inside)),
                    f"{inside['ttft_s'] / served['ttft_s']:.4f}",
                    *(f"{run['hits']:.4f}" for run in (served, inside)),
                    f"{served['failed'] + inside['failed']:.0f}",
                ]
            )
    heads = ["trace", "seed", "placed alike", "mean TTFT, s: served", "transport", "of served"]
    heads += ["prompt tokens cached: served", "transport", "failed"]
    return ["", "## Decisions", "", "Four simulated engines, in virtual time:", *table(heads, rows), ""]


def _play_alone(name: str, how: str, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.virtual", "benchmarks.embedded", "--play", name, how, str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def as_markdown(
    found: Mapping[str, Mapping[str, Taken]],
    added: Mapping[str, float],
    *,
    command: str,
) -> str:
    """Medians over the rounds, and ratios within a round."""
    rows = []
    for case, taken in found.items():
        for name, one in taken.items():
            ratios = [
                statistics.median(a / b for a, b in zip(one.p50_us, taken[base].p50_us, strict=True))
                for base in (STRAIGHT, SERVED)
            ]
            cpu = statistics.median(a / b for a, b in zip(one.cpu_us, taken[STRAIGHT].cpu_us, strict=True))
            rows.append(
                [
                    case,
                    name,
                    f"{statistics.median(one.p50_us):.0f}",
                    *(f"{ratio:.2f}" for ratio in ratios),
                    f"{statistics.median(one.cpu_us):.0f}",
                    f"{cpu:.2f}",
                ]
            )
    heads = ["case", "client", "p50, us", "of straight", "of served", "CPU of the client's process, us", "of straight"]
    return "\n".join(
        [
            "# Routing in the client's own process",
            "",
            f"`{command}`. One request at a time; ratios are medians of those within one round.",
            "",
            *table(heads, rows),
            "",
            "The middleware adds, in CPU:",
            *table(["request", "us"], [[kind, f"{us:.2f}"] for kind, us in added.items()]),
            "",
        ]
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--traces", action="store_true", help="only what is decided on traces")
    parser.add_argument("--seeds", type=int, default=3, help="of the traces: order at one moment, draws for ties")
    parser.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        name, how, seed = args.play
        print(json.dumps(virtual.run(play_trace(name, served=how == "served", seed=int(seed)))))
        return
    if args.traces:
        print("\n".join(play_traces(args.seeds)))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        one, two, public = free_ports(3)
        stub = [sys.executable, "-m", "benchmarks.stub", str(one), str(two)]
        stack.enter_context(Process(stub, core="0-1", log=folder / "stub.log"))
        engines = {"a": f"http://127.0.0.1:{one}", "b": f"http://127.0.0.1:{two}"}
        config = folder / "config.yaml"
        config.write_text(
            json.dumps({"listen": f"127.0.0.1:{public}", "admin": {"enabled": False}, "endpoints": engines})
        )
        serve = [sys.executable, "-m", "kvproxy", "serve", "-c", str(config)]
        process = stack.enter_context(Process(serve, core="0-1", log=folder / "serve.log"))
        probe = body_of(100, stream=False, session=0)
        if problem := process.wait_until_ready(public, probe, path=PATH):
            raise SystemExit(problem)
        urls = {STRAIGHT: engines["a"], SERVED: f"http://127.0.0.1:{public}", INSIDE: "http://engines"}
        found = asyncio.run(measure(urls, engines, requests=args.requests, rounds=args.rounds))
    added = asyncio.run(measure_middleware(rounds=args.rounds))
    command = f"python -m benchmarks.embedded --requests {args.requests} --rounds {args.rounds}"
    sys.stdout.write(as_markdown(found, added, command=command))


if __name__ == "__main__":
    main()
