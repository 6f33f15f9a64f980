"""The router queue through a whole proxy: waiting, overtaking, 429, and a client that gives up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.base.errors import QueueFull
from kvproxy.proxy.forward import forwarder
from kvproxy.proxy.listener.server import serve
from tests.support.clock import FakeClock
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, reply, start_stream
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
    queue: dict[str, Any] = {"limit": 2, "max_wait": "100s"}
    one_by_one: dict[str, Any] = {"pool": {"max_connections": 1}, "timeouts": {"connect": "60s"}}
    async with (
        serve(engine) as url,
        running_proxy({"a": url}, policy="kv_aware", queue=queue, **one_by_one) as proxy,
    ):
        first = ask(proxy, LONG)
        await until(lambda: len(engine.calls) == 1)
        room = proxy.proxy.clusters["default"].queue
        assert room is not None
        began = asyncio.get_running_loop().time()
        long = ask(proxy, "other " * 40_000)  # of which nothing is cached: 14 s of prefill
        await until(lambda: len(room) == 1)
        short = ask(proxy, SHORT)
        await until(lambda: len(room) == 2)
        refused = await ask(proxy, SHORT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        longest_wait_s = asyncio.get_running_loop().time() - began
        assert 100 - longest_wait_s <= int(refused.headers["retry-after"]) <= 100  # never too early
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
        room = proxy.proxy.clusters["default"].queue
        assert room is not None
        leaving = ask(proxy, SHORT)
        await until(lambda: len(room) == 1)
        leaving.cancel()
        await until(lambda: len(room) == 0)
        go_on.set()
        assert (await first).status_code == 200
    assert len(engine.calls) == 1


async def test_a_prompt_follows_one_that_went_while_it_waited() -> None:
    """Another request with the same long prefix overtakes it and goes to b: it goes there too, though a is free, and
    though no engine held the prefix when it came. (What engines take is not this machine's time: the clock stands
    still.)"""
    engines = {name: Gated(name) for name in ("a", "b")}
    queue: dict[str, Any] = {"max_wait": "100s", "priority_header": "x-priority"}
    async with (
        serve(engines["a"].engine) as a,
        serve(engines["b"].engine) as b,
        running_proxy({"a": a, "b": b}, policy="kv_aware", queue=queue, clock=FakeClock()) as proxy,
    ):
        room = proxy.proxy.clusters["default"].queue
        assert room is not None
        fillers = []
        for number in range(2):
            fillers.append(ask(proxy, f"filler {number} " * 20_000))
            await until(lambda: sum(len(one.engine.calls) for one in engines.values()) == len(fillers))
        waits = ask(proxy, LONG + "and a question")
        await until(lambda: len(room) == 1)
        overtakes = ask(proxy, LONG + "and another one", priority="1")
        await until(lambda: len(room) == 2)
        engines["b"].let_go()
        await until(lambda: len(engines["b"].engine.calls) == 2)
        assert len(room) == 1
        engines["a"].let_go()
        await asyncio.gather(*fillers)
        await until(lambda: len(engines["b"].engine.calls) == 3)
        engines["b"].let_go(2)
        answers = await asyncio.gather(*fillers, waits, overtakes)
    assert [answer.headers["x-kvproxy-endpoint"] for answer in answers[2:]] == ["b", "b"]


async def test_a_retry_does_not_queue_again() -> None:
    """A request let in once that failed goes on at the other engine at once, before later ones that wait."""
    fail, go_on, asked = asyncio.Event(), asyncio.Event(), list[str]()

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        asked.append(engine.name)
        if len(asked) == 1:
            await fail.wait()
            await reply(send, 500, b'{"error":{"message":"boom"}}')
            return
        await go_on.wait()
        await answer_ok(engine, call, send)

    async with (
        serve(FakeEngine("a", behave)) as a,
        serve(FakeEngine("b", behave)) as b,
        running_proxy({"a": a, "b": b}, policy="kv_aware", queue={"max_wait": "100s"}) as proxy,
    ):
        room = proxy.proxy.clusters["default"].queue
        assert room is not None
        fails = ask(proxy, LONG)
        await until(lambda: len(asked) == 1)
        other = ask(proxy, "other " * 40_000)
        await until(lambda: len(asked) == 2)
        fail.set()
        await until(lambda: len(asked) == 3 or len(room) == 1)
        assert len(room) == 0
        go_on.set()
        answers = await asyncio.gather(fails, other)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert asked[2] == asked[1] != asked[0]


async def test_tenants_wait_by_the_weight_of_their_keys() -> None:
    """Of the requests that go out while both wait, one of weight 3 has three in four."""
    engine = Gated("a")
    keys = [{"name": "heavy", "key": "sk-h", "weight": 3}, {"name": "light", "key": "sk-l"}]
    async with (
        serve(engine.engine) as url,
        running_proxy(
            {"a": url},
            policy="kv_aware",
            queue={"max_wait": "100s"},
            filters={"auth": {"keys": keys}},
            clock=FakeClock(),
        ) as proxy,
    ):
        room = proxy.proxy.clusters["default"].queue
        assert room is not None
        tasks = [ask(proxy, "filler " * 20_000, key="sk-l")]
        await until(lambda: len(engine.engine.calls) == 1)
        for number in range(8):
            for name in ("light", "heavy"):
                tasks.append(ask(proxy, f"{name} {number} " + "word " * 20_000, key=f"sk-{name[0]}"))
                await until(lambda: len(room) == len(tasks) - 1)
        for served in range(1, 9):
            engine.let_go()
            await until(lambda served=served: len(engine.engine.calls) > served)
        engine.let_go(100)
        await asyncio.gather(*tasks)
    assert sum(b"heavy" in call.body for call in engine.engine.calls[1:9]) == 6


class Gated:
    """An engine that answers as many requests as it was let to, the oldest first."""

    def __init__(self, name: str) -> None:
        self.engine = FakeEngine(name, self._behave)
        self._allowed = asyncio.Semaphore(0)

    def let_go(self, count: int = 1) -> None:
        """Answer so many more."""
        for _ in range(count):
            self._allowed.release()

    async def _behave(self, engine: FakeEngine, call: Call, send: Send) -> None:
        await self._allowed.acquire()
        await answer_ok(engine, call, send)


def ask(proxy: RunningProxy, content: str, *, priority: str = "0", key: str = "") -> asyncio.Task[Any]:
    """Send a streamed chat, so that its first byte is its first token."""
    body, headers = chat(content, stream=True), {"x-priority": priority, "x-api-key": key}
    return asyncio.create_task(proxy.client.post("/v1/chat/completions", json=body, headers=headers))


@pytest.fixture
def chatty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send comments often."""
    monkeypatch.setattr(forwarder, "COMMENT_S", 0.01)


@pytest.mark.usefixtures("chatty")
async def test_a_stream_that_waits_gets_comments_and_then_its_answer() -> None:
    """With one head, so that nothing between gives up; an answer that is not streamed gets nothing before its own."""
    go_on = asyncio.Event()
    commented = asyncio.Event()

    async def busy(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        if b'"stream":true' not in call.body:
            await answer_ok(engine, call, send)
            return
        await start_stream(send)
        await event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async with serve(FakeEngine("a", busy)) as url, running_proxy({"a": url}, policy="kv_aware", queue={}) as proxy:
        first = ask(proxy, LONG)
        queue = proxy.proxy.clusters["default"].queue
        assert queue is not None
        await until(lambda: proxy.proxy.clusters["default"].endpoints[0].load.in_flight == 1)

        async def stream() -> tuple[int, list[str]]:
            lines = []
            body = chat(SHORT, stream=True)
            async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
                async for line in answer.aiter_lines():
                    lines.append(line)
                    commented.set()
            return answer.status_code, lines

        streamed = asyncio.create_task(stream())
        await commented.wait()
        plain = asyncio.create_task(proxy.client.post("/v1/chat/completions", json=chat(SHORT)))
        await until(lambda: len(queue) == 2)
        go_on.set()
        status, lines = await streamed
        assert status == 200
        assert lines[0] == ": waiting for an engine"
        assert [line for line in lines if line and not line.startswith(":")] == ["data: [DONE]"]
        assert (await first).status_code == (await plain).status_code == 200
        assert (await plain).json()["served_by"] == "a"


@pytest.mark.usefixtures("chatty")
async def test_a_refusal_after_comments_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has the head of a stream already."""
    go_on = asyncio.Event()

    async def busy(engine: FakeEngine, call: Call, send: Send) -> None:
        await go_on.wait()
        await answer_ok(engine, call, send)

    async with serve(FakeEngine("a", busy)) as url, running_proxy({"a": url}, policy="kv_aware", queue={}) as proxy:
        first = ask(proxy, LONG)
        queue = proxy.proxy.clusters["default"].queue
        assert queue is not None
        await until(lambda: proxy.proxy.clusters["default"].endpoints[0].load.in_flight == 1)
        late = asyncio.get_running_loop().create_future()

        async def refuse(*_: object, **__: object) -> None:
            await late

        monkeypatch.setattr(queue, "wait", refuse)
        lines = []
        body = chat(SHORT, stream=True)
        async with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if not late.done():
                    late.set_exception(QueueFull(7.0))
        assert answer.status_code == 200
        assert '"code":"queue_full"' in next(line for line in lines if line.startswith("data: {"))
        go_on.set()
        await first
