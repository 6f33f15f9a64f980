"""Many requests at once, and an engine that dies under them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.base.upstream.transport import PoolTransport
from kvproxy.proxy.listener.server import Server, serve
from tests.support.fake_engine import Call, FakeEngine, event, start_stream
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

DONE = b"data: [DONE]\n\n"
#: Engines, proxy and clients share one loop here, so a burst may take its time; that is not what is tested.
PATIENT = {"connect": "60s"}


async def read_stream(proxy: RunningProxy, seen: list[str] | None = None) -> tuple[int, str]:
    text = ""
    async with proxy.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        async for piece in answer.aiter_text():
            if not text and seen is not None:
                seen.append(answer.headers["x-kvproxy-endpoint"])
            text += piece
        return answer.status_code, text


@pytest.mark.slow
async def test_a_thousand_concurrent_streams_finish() -> None:
    """All are open at the same time before any may end; nothing is left in flight."""
    everybody_here = asyncio.Event()

    async def wait_for_all(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b'{"n":1}')
        await everybody_here.wait()
        await send({"type": "http.response.body", "body": DONE})

    engines = [FakeEngine(name, wait_for_all) for name in "ab"]
    async with (
        serve(engines[0]) as a,
        serve(engines[1]) as b,
        running_proxy({"a": a, "b": b}, timeouts=PATIENT) as proxy,
    ):
        async with UpstreamPool(max_connections=1000) as pool:  # httpx's own pool takes seconds for a thousand
            proxy.client = httpx.AsyncClient(base_url=proxy.url, transport=PoolTransport(pool), timeout=60)
            tasks = [asyncio.create_task(read_stream(proxy)) for _ in range(1000)]
            await until(lambda: sum(len(engine.calls) for engine in engines) == 1000, within_s=60)
            everybody_here.set()
            results = await asyncio.gather(*tasks)
        assert all(status == 200 and text.endswith(DONE.decode()) for status, text in results)
        assert [endpoint.load.in_flight for endpoint in proxy.proxy.clusters["default"].endpoints] == [0, 0]
    assert [len(engine.calls) for engine in engines] == [500, 500]


@pytest.mark.slow
async def test_a_killed_engine_loses_only_what_had_begun() -> None:
    """Streams whose first byte was sent get an error event; everything else is answered by the other engine."""
    finish = asyncio.Event()

    async def some_begin(engine: FakeEngine, call: Call, send: Send) -> None:
        """Every second request gets its first token; the others still wait for their prefill."""
        number = len(engine.calls)
        await start_stream(send)
        if number % 2 == 0 or engine.name == "survivor":
            await event(send, b'{"n":1}')
        await finish.wait()
        await send({"type": "http.response.body", "body": DONE})

    victim, survivor = FakeEngine("victim", some_begin), FakeEngine("survivor", some_begin)
    doomed = Server(victim, drain_s=1.0)
    await doomed.__aenter__()
    seen: list[str] = []
    config: dict[str, Any] = {"retry": {"min_per_second": 1000}, "timeouts": PATIENT}
    async with serve(survivor) as url, running_proxy({"a": doomed.url, "b": url}, **config) as proxy:
        tasks = [asyncio.create_task(read_stream(proxy, seen)) for _ in range(40)]
        await until(lambda: len(victim.calls) + len(survivor.calls) == 40 and len(seen) == 30)
        begun = seen.count("a")
        await doomed.__aexit__(None, None, None)  # cuts every connection after its second of grace
        late = [asyncio.create_task(read_stream(proxy)) for _ in range(10)]
        await until(lambda: len(survivor.calls) == 20 + 10 + 10)
        finish.set()
        results = await asyncio.gather(*tasks, *late)
    assert all(status == 200 for status, _ in results)
    broken = [text for _, text in results if '"error"' in text]
    assert len(broken) == begun == 10
    assert all("upstream_disconnected" in text and '"n":1' in text for text in broken)
    assert sum(text.endswith(DONE.decode()) and '"error"' not in text for _, text in results) == 40
