"""Cost of the shield per request: microseconds of `before`, beside the body guard that reads the same names.

python -m benchmarks.shield > benchmarks/reports/shield.md"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import InferenceRequest, RequestKind
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.engines import Engines
from kvproxy.cluster.routes import Routes
from kvproxy.features.shield.filter import ShieldFilter
from kvproxy.features.shield.rules import open_rules
from kvproxy.features.shield.versions import EngineVersions
from kvproxy.proxy.filters.chain import Services
from kvproxy.proxy.forward.body_guard import BodySanitizer
from kvproxy.proxy.request.body import BodyReader, HeldBodies
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import decode_body
from kvproxy.proxy.request.session import NO_CALLER

ROUNDS, CALLS = 15, 2000


def bodies() -> dict[str, bytes]:
    """Return a short chat, a long one, and an agent's with tools."""
    words = random.Random(1)
    text = " ".join(f"w{words.randrange(9999)}" for _ in range(2000))
    tool = {"type": "function", "function": {"name": "read", "description": text[:1500], "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}}}}}  # fmt: skip
    turns = [{"role": "user", "content": text[:4000]}] * 12
    short = {"model": "m", "messages": [{"role": "user", "content": text[:800]}], "temperature": 0.2, "max_tokens": 99}
    return {
        "chat, 1 KB": json.dumps(short).encode(),
        "chat, 49 KB": json.dumps({**short, "messages": turns}).encode(),
        "agent, 49 KB and 20 tools of 1.7 KB": json.dumps({**short, "messages": turns, "tools": [tool] * 20}).encode(),
        "chat, 49 KB, with `n: 2`": json.dumps({**short, "messages": turns, "n": 2}).encode(),
    }


def shield_of(version: str) -> ShieldFilter:
    """Return a filter whose fleet reports this version."""
    pool, held = UpstreamPool(), HeldBodies(1 << 30)
    versions = EngineVersions({}, Engines(pool, timeout_s=1.0))
    versions.rules = open_rules(version)
    return ShieldFilter(
        _nothing, refuses=True, trusts_all=False, versions=versions, services=Services({}, Routes([]), pool, held),
        reader=BodyReader(limit_bytes=1 << 25, timeout_s=60.0, held=held), metrics=Metrics(), clock=time.monotonic,
    )  # fmt: skip


async def _nothing(scope: object, receive: object, send: object) -> None: ...


def microseconds(call: Callable[[], object]) -> float:
    """Return the least of some rounds, since other load only adds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.process_time() - began) / CALLS * 1e6)
    return min(rounds)


_HEAD = """# What the shield costs a request

`python -m benchmarks.shield`, %s, CPU microseconds, the least of %d rounds of %d calls. The guard reads the names of
a body in any case; with the shield it finds them read. A fleet of 0.18.0 has faults, one of 0.32.0 none for these.

| body | guard alone | guard and shield, 0.18.0 | added | guard and shield, 0.32.0 | added |
|---|---|---|---|---|---|"""


def main() -> None:
    """Print the report."""
    guard, old, new = BodySanitizer(), shield_of("vLLM 0.18.0"), shield_of("vLLM 0.32.0")
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    print(_HEAD % (f"{datetime.now(UTC):%Y-%m-%d}", ROUNDS, CALLS))
    for name, body in bodies().items():
        inference = decode_body(RequestKind.CHAT, body, NO_CALLER)
        assert inference is not None

        def ask(*filters: ShieldFilter, body: bytes = body, inference: InferenceRequest = inference) -> None:
            exchange = Exchange(received_at=0.0, body=body, inference=inference)
            downstream = Downstream(exchange, scope, _nothing, _nothing, (), None, False)  # type: ignore[arg-type]
            for shield in filters:
                waits = shield.before(exchange, downstream)
                if waits is not None:
                    waits.close()  # type: ignore[attr-defined]
            guard.passes(body, exchange)

        alone, faulty, mended = (microseconds(partial(ask, *one)) for one in ((), (old,), (new,)))
        print(f"| {name} | {alone:.1f} | {faulty:.1f} | {faulty - alone:+.1f} | {mended:.1f} | {mended - alone:+.1f} |")
    print(
        f"\nA member that may matter is looked at in the body's bytes ({examined():.0f} us for the chat with `n: 2`)."
    )


def examined() -> float:
    """Of the second look, in a running loop."""
    shield, body = shield_of("vLLM 0.18.0"), bodies()["chat, 49 KB, with `n: 2`"]
    inference = decode_body(RequestKind.CHAT, body, NO_CALLER)

    async def run() -> float:
        began = time.process_time()
        for _ in range(CALLS):
            exchange = Exchange(received_at=0.0, body=body, inference=inference)
            await shield._find(exchange, body, "/v1/chat/completions")
        return (time.process_time() - began) / CALLS * 1e6

    return asyncio.run(run())


if __name__ == "__main__":
    main()
