"""Cost of the kvcache filter, its deadline, and how often a chat's next turn has a preference.

`python -m benchmarks.kvcache_filter [--requests N] [--out FOLDER]`; writes kvcache-filter.md. One process and one core:
whole proxies as ASGI apps over a stub engine on loopback, the variants interleaved request by request."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.stub import Engine
from kvproxy.app import Proxy
from kvproxy.base.types import InferenceRequest, RequestKind
from kvproxy.cache.service import KvCache
from kvproxy.lab.served import serve_fleet
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import FleetSettings, clone_engines
from kvproxy.lab.simulator.lmcache_chunks import WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerApp, ControllerSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.filters.kvcache import STATE_KEY
from kvproxy.proxy.listener.server import Server
from kvproxy.proxy.request.parse import parse_body

PATH = "/v1/chat/completions"
SIZES = {"2 KB": 2_048, "64 KB": 65_536}
BYTES_PER_TOKEN = 4
STRATEGIES = {"enable_pinning": True, "enable_compression": True, "enable_eviction": True, "pin_lease": "1h"}
DEADLINE_S = 0.05

TEXT = """# kvcache filter

`python -m benchmarks.kvcache_filter --requests {requests}`, one core of a shared machine; whole requests through the
proxy as an ASGI app over a stub engine on loopback, the variants interleaved. The controller runs in the same process:
its own work is part of the last row of each size.

| prompt | kvcache | p50 ms | p99 ms | added p50 ms |
|---|---|---|---|---|
{table}

Limits: 0.3 ms added at 2 KB and 2 ms at 64 KB on the warm path (tokens remembered).

Lookup deadline of {deadline:.0f} ms with a service that is always late: over it by {p50:.2f} ms (p50), {p99:.2f} ms
(p99), {p999:.2f} ms (p99.9); the limit is 5 ms on an idle machine.

Turns after a chat's first that had a preferred endpoint before routing, without any inline tokenize call: {ours:.0%}
by message prefix; {exact:.0%} where only whole prompts are remembered.
"""


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def chat(*contents: str) -> bytes:
    """Return a chat's raw body."""
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(i, 1) + (i > 1 and i % 2 == 0)], "content": c} for i, c in enumerate(contents)]
    return json.dumps({"model": "bench", "max_tokens": 4, "messages": messages}).encode()


def text(rng: random.Random, size: int) -> str:
    """Words that do not repeat."""
    return "".join(rng.choices("abcdefghij klmnop qrstuv wxyz", k=size))


async def started(stack: AsyncExitStack, filters: list[Any], endpoints: dict[str, str]) -> Proxy:
    """Start a proxy with this chain and the kv_aware policy."""
    raw = {"endpoints": endpoints, "policy": "kv_aware", "health": {"active": False}, "filters": filters}
    return await stack.enter_async_context(Proxy(load_config(raw)))


def kvcache_of(proxy: Proxy) -> KvCache:
    """Return the proxy's kvcache service."""
    assert proxy.kvcache is not None
    return proxy.kvcache


def request_scope(body: bytes) -> dict[str, Any]:
    """Of a chat request with this body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "scheme": "http", "http_version": "1.1", "state": {},
    }  # fmt: skip


async def once(proxy: Proxy, body: bytes, scope: dict[str, Any]) -> float:
    """Seconds of one request through the whole chain."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        return waiting.pop() if waiting else await gone

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200

    began = time.perf_counter()
    await proxy(scope, receive, send)
    return time.perf_counter() - began


async def added_latency(requests: int) -> list[tuple[str, str, float, float, float]]:
    """Size, variant, p50 and p99 in ms, and p50 added to the chain without the filter."""
    rng = random.Random(1)
    bodies = {
        name: [chat(text(rng, size // 2), text(rng, size // 2)) for _ in range(20)] for name, size in SIZES.items()
    }
    async with AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Engine, "127.0.0.1", 0)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        endpoints = dict.fromkeys("ab", f"http://127.0.0.1:{port}")
        workers = tuple(WorkerSettings(name) for name in endpoints)
        controller = ControllerApp(ControllerSettings(workers), rng=rng)
        lmcache = (await stack.enter_async_context(Server(controller))).url
        full = {"lmcache_endpoint": lmcache, "cache_strategy": STRATEGIES, "engine_metrics_interval": 0}
        chains: dict[str, list[Any]] = {
            "without the filter": ["inference_request", "router"],
            "local sources (the default)": ["inference_request", "kvcache", "router"],
            "everything on, tokens remembered": [
                "inference_request", {"kvcache": {**full, "lookup_min_tokens": 10**9}}, "router",
            ],
            "and a lookup on loopback": ["inference_request", {"kvcache": full}, "router"],
        }  # fmt: skip
        proxies = {name: await started(stack, chain, endpoints) for name, chain in chains.items()}
        _remember(list(proxies.values())[2:], bodies, controller)
        return [row for size in SIZES for row in await _measure(size, bodies[size], proxies, requests)]


def _remember(proxies: list[Proxy], bodies: dict[str, list[bytes]], controller: Any) -> None:
    """Every prompt's tokens are known, and the controller has them at a."""
    for number, body in enumerate(body for group in bodies.values() for body in group):
        request = _parsed(body)
        tokens = array("I", [(number * 7919 + index) % 100_000 for index in range(len(body) // BYTES_PER_TOKEN)])
        for proxy in proxies:
            overlap = kvcache_of(proxy).overlap
            (local,) = overlap.indexes.values()
            overlap.tokens.memory.remember(local.prompts.hash_prompt(request, "bench")[1], tokens)
        controller.workers["a"].admit(tokens)


async def _measure(
    size: str, bodies: list[bytes], proxies: dict[str, Proxy], requests: int
) -> list[tuple[str, str, float, float, float]]:
    times: dict[str, list[float]] = {name: [] for name in proxies}
    for round_ in range(requests + len(bodies)):
        body = bodies[round_ % len(bodies)]
        for name, proxy in proxies.items():
            took_s = await once(proxy, body, request_scope(body))
            if round_ >= len(bodies):  # the first sight of each prompt is not the warm path
                times[name].append(took_s)
    base = percentile(next(iter(times.values())), 0.5)
    return [
        (size, name, percentile(t, 0.5) * 1e3, percentile(t, 0.99) * 1e3, (percentile(t, 0.5) - base) * 1e3)
        for name, t in times.items()
    ]


async def deadline(requests: int) -> tuple[float, float, float]:
    """Milliseconds that asking took beyond the deadline at p50, p99 and p99.9, with a service that is always late."""
    async with AsyncExitStack() as stack:
        lmcache = stack.enter_context(_late_service())
        settings = {"lmcache_endpoint": lmcache, "engine_metrics_interval": 0, "lookup_routing_timeout": DEADLINE_S}
        proxy = await started(
            stack, ["inference_request", {"kvcache": settings}, "router"], {"a": "http://127.0.0.1:9"}
        )
        kv = kvcache_of(proxy)
        over = []
        for number in range(requests):
            ids = [number, *range(600)]
            body = json.dumps({"model": "bench", "prompt": ids}).encode()
            request = parse_body(RequestKind.COMPLETION, body)
            assert request is not None
            began = time.perf_counter()
            await kv.facts_for(request, body, cluster=proxy.clusters["default"])
            over.append((time.perf_counter() - began - DEADLINE_S) * 1e3)
            await asyncio.sleep(0.02)  # late answers come one by one, not all at the end
        return percentile(over, 0.5), percentile(over, 0.99), percentile(over, 0.999)


@contextmanager
def _late_service() -> Iterator[str]:
    """URL of a controller whose lookups take a second, in a process of its own: its work must not delay our timers."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve_late, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve_late(parent: Connection) -> None:
    """Run the child process, which sends its URL."""
    controller = ControllerApp(ControllerSettings((WorkerSettings("a"),), lookup_s=1.0), rng=random.Random(2))

    async def serve() -> None:
        async with Server(controller, drain_s=0.1, cut_grace_s=0.1) as server:
            parent.send(server.url)
            await asyncio.Event().wait()

    uvloop.run(serve())


async def turns(sessions: int, length: int) -> tuple[float, float]:
    """Share of turns after a chat's first that had a preference before routing; and the share that would have had one
    without a tokenize call were only whole prompts remembered. Simulated engines and controller."""
    rng = random.Random(3)
    async with AsyncExitStack() as stack:
        engine = VllmSettings(model="bench", engine=EngineSettings(65_536, 16, token_outputs=True))
        fleet = await stack.enter_async_context(
            serve_fleet(FleetSettings(clone_engines(engine, 2)), rng=random.Random(4))
        )
        endpoints = fleet.engines
        settings = {"lmcache_endpoint": fleet.lmcache, "lookup_routing_timeout": 1.0}
        settings |= {"preference_header": "x-preferred"}  # so that the preferred endpoint is told
        proxy = await started(stack, ["inference_request", {"kvcache": settings}, "router"], endpoints)
        later = preferred = whole = 0
        seen: set[bytes] = set()
        histories = [[text(rng, 1200), text(rng, 800)] for _ in range(sessions)]
        for turn in range(length):
            for history in histories:
                body = chat(*history)
                scope = request_scope(body)
                await once(proxy, body, scope)
                if turn:
                    later += 1
                    preferred += STATE_KEY in scope["state"]
                    whole += body in seen
                seen.add(body)
                history += [text(rng, 300), text(rng, 200)]
        return preferred / later, whole / later


def _parsed(body: bytes) -> InferenceRequest:
    request = parse_body(RequestKind.CHAT, body)
    assert request is not None
    return request


async def report(requests: int) -> str:
    """All of it as Markdown."""
    rows = await added_latency(requests)
    p50, p99, p999 = await deadline(max(1000, requests))
    ours, exact = await turns(50, 6)
    table = [f"| {size} | {name} | {a:.3f} | {b:.3f} | {added:+.3f} |" for size, name, a, b, added in rows]
    return TEXT.format(
        requests=requests, table="\n".join(table), deadline=DEADLINE_S * 1e3, p50=p50, p99=p99, p999=p999, ours=ours,
        exact=exact,
    )  # fmt: skip


def main() -> None:
    """Print the report, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    gc.freeze()
    text_ = uvloop.run(report(arguments.requests))
    print(text_)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "kvcache-filter.md").write_text(text_)


if __name__ == "__main__":
    main()
