"""The router queue through a whole proxy: waiting, overtaking, 429, and a client that gives up."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send

from kvproxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

LONG = "word " * 40_000
SHORT = "hello"


async def test_requests_wait_overtake_and_are_refused() -> None:
    """With the engine busy one request may wait; the next is told when to come back; the short one goes first."""
    go_on = asyncio.Event()

    async def busy(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    engine = FakeEngine("a", busy)
    queue: dict[str, Any] = {"limit": 2, "max_wait": "20s"}
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware", queue=queue) as proxy:
        first = ask(proxy, LONG)
        await until(lambda: len(engine.calls) == 1)
        room = proxy.proxy.clusters["default"].room
        assert room is not None
        long = ask(proxy, LONG)
        await until(lambda: len(room) == 1)
        short = ask(proxy, SHORT)
        await until(lambda: len(room) == 2)
        refused = await ask(proxy, SHORT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        go_on.set()
        answers = await asyncio.gather(first, long, short)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [len(call.body) > 1000 for call in engine.calls] == [True, False, True]


async def test_a_client_that_gives_up_waiting_frees_its_place() -> None:
    """Its request never reaches an engine."""
    go_on = asyncio.Event()

    async def busy(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    engine = FakeEngine("a", busy)
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware", queue={}) as proxy:
        first = ask(proxy, LONG)
        await until(lambda: len(engine.calls) == 1)
        room = proxy.proxy.clusters["default"].room
        assert room is not None
        leaving = ask(proxy, SHORT)
        await until(lambda: len(room) == 1)
        leaving.cancel()
        await until(lambda: len(room) == 0)
        go_on.set()
        assert (await first).status_code == 200
    assert len(engine.calls) == 1


def ask(proxy: RunningProxy, content: str) -> asyncio.Task[Any]:
    """A streamed chat, so that its first byte is its first token."""
    body = chat(content, stream=True)
    return asyncio.create_task(proxy.client.post("/v1/chat/completions", json=body))
