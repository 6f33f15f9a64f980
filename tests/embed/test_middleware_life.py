"""KVCacheMiddleware in other people's processes: event loops, starts that fail, slow uploads, shared state."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

import kvproxy
from kvproxy import KVCacheMiddleware
from kvproxy.base.errors import ConfigError
from kvproxy.cache.metrics_scraper import MetricsScraper
from kvproxy.embed.service import RETRY_S
from kvproxy.proxy.listener.server import serve
from tests.embed.test_middleware import CHAT, ENGINES, TURN, lifespan, raw, tasks
from tests.support.asgi import Inner, Reply, call, http_scope
from tests.support.clock import FakeClock
from tests.support.until import until

DEAD_LMCACHE = {"lmcache_endpoint": "http://127.0.0.1:9", "cache_strategy": {"enable_pinning": True}}
END: Message = {"type": "http.request", "body": b"", "more_body": False}


class Serving:
    """An app that serves everything from b and notes which endpoint was preferred, once it has the body."""

    def __init__(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.headers = headers
        self.seen: list[str | None] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = Inner(headers=list(self.headers))
        if scope["type"] == "lifespan":
            await host_lifespan(receive, send)
            return

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.seen.append(kvproxy.preferred(scope))
                kvproxy.served(scope, "b")
            await send(message)

        await inner(scope, receive, noting)
        self.bodies += inner.bodies


async def host_lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def chat(app: Any, *messages: Message, body: bytes = raw(TURN), **scope: Any) -> Reply:
    return await call(app, http_scope(CHAT, method="POST", **scope), *messages, body=b"" if messages else body)


async def live(app: Any) -> None:
    """One life of the app under a server: start, a request, end."""
    life = lifespan(app)
    assert await anext(life) == "lifespan.startup.complete"
    await chat(app)
    assert await anext(life) == "lifespan.shutdown.complete"
    await anext(life, None)


# event loops


@pytest.mark.parametrize("settings", [None, DEAD_LMCACHE], ids=["defaults", "LMCache away"])
def test_a_second_event_loop_starts_it_anew_with_what_it_learned(settings: Any) -> None:
    """As a test client makes one for each request, and a warm-up before a fork does; leaving ends at once."""
    app = Serving()
    under_test = KVCacheMiddleware(app, endpoints=ENGINES, settings=settings)
    asyncio.run(_alone(under_test))
    asyncio.run(_alone(under_test))
    asyncio.run(asyncio.wait_for(live(under_test), 10))
    assert app.seen == [None, "b", "b"]


async def _alone(app: Any) -> None:
    """Send a request in a loop that ends right behind it, so that nothing of it may be left."""
    await chat(app)


def test_long_bodies_pass_in_a_second_event_loop() -> None:
    """They take turns, by a lock that belongs to the loop."""
    app = Serving()
    under_test = KVCacheMiddleware(app, endpoints=ENGINES)
    long = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()

    async def four() -> list[int]:
        return [reply.status for reply in await asyncio.gather(*(chat(under_test, body=long) for _ in range(4)))]

    assert [asyncio.run(four()) for _ in range(2)] == [[200] * 4] * 2


async def test_in_a_loop_beside_the_one_it_runs_in_requests_pass_without_facts() -> None:
    """Nothing of it may be touched from another thread."""
    app = Serving()
    async with KVCacheMiddleware(app, endpoints=ENGINES) as under_test:
        await chat(under_test)
        other = threading.Thread(target=lambda: asyncio.run(_alone(under_test)))
        other.start()
        other.join()
        await chat(under_test)
    assert app.seen == [None, None, "b"]


async def test_it_cannot_be_entered_in_a_loop_beside_the_one_it_runs_in() -> None:
    async with KVCacheMiddleware(Serving(), endpoints=ENGINES) as under_test:
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                asyncio.run(under_test.__aenter__())
            except RuntimeError as error:
                errors.append(error)

        other = threading.Thread(target=enter)
        other.start()
        other.join()
    assert "another event loop" in str(errors[0])


async def test_it_can_be_started_again_after_its_end() -> None:
    """Its readings of the engines go on each time, and so does what it learned."""
    app, engine = Serving(), Inner()

    def readings() -> int:
        return sum(scope["path"] == "/metrics" for scope in engine.scopes)

    async with serve(engine, drain_s=0.01, cut_grace_s=0.01) as url:
        under_test = KVCacheMiddleware(app, endpoints={"b": url}, settings={"engine_metrics_interval": 0.01})
        for _ in range(3):
            before = readings()
            async with under_test:
                await chat(under_test)
                await until(lambda: readings() > before)  # noqa: B023
            assert not tasks()
    assert app.seen == [None, "b", "b"]


# starts and ends that fail


def fail_to_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Plant an error in a part of the service; the result takes it out."""
    real = MetricsScraper.__aenter__

    async def broken(self: MetricsScraper) -> None:
        raise OSError("no sockets left")

    monkeypatch.setattr(MetricsScraper, "__aenter__", broken)
    return lambda: monkeypatch.setattr(MetricsScraper, "__aenter__", real)


async def test_a_service_that_cannot_start_leaves_the_host_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both halves of the host's lifespan run, its requests pass, and the next start is tried a minute later."""
    mend = fail_to_start(monkeypatch)
    clock, app = FakeClock(), Serving()
    under_test = KVCacheMiddleware(app, endpoints=ENGINES, clock=clock, settings={"preference_header": "x-kv"})
    life = lifespan(under_test)
    assert await anext(life) == "lifespan.startup.complete"
    replies = [await chat(under_test, headers=[(b"x-kv", b"evil")]) for _ in range(3)]
    assert [reply.status for reply in replies] == [200] * 3
    assert caplog.text.count("cannot start") == 1
    mend()
    clock.advance(RETRY_S)
    await chat(under_test)
    await chat(under_test)
    assert app.seen == [None, None, None, None, "b"]
    assert await anext(life) == "lifespan.shutdown.complete"
    await anext(life, None)
    assert not tasks()


async def test_entered_by_hand_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    mend = fail_to_start(monkeypatch)
    under_test = KVCacheMiddleware(Serving(), endpoints=ENGINES)
    with pytest.raises(OSError, match="no sockets left"):
        await under_test.__aenter__()
    mend()
    async with under_test:
        assert tasks()


async def test_an_end_that_fails_is_logged_and_the_host_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = MetricsScraper.__aexit__

    async def broken(self: MetricsScraper, *args: object) -> None:
        await real(self, *args)
        raise OSError("cannot end")

    monkeypatch.setattr(MetricsScraper, "__aexit__", broken)
    with caplog.at_level(logging.ERROR):
        await live(KVCacheMiddleware(Serving(), endpoints=ENGINES))
    assert "cannot end" in caplog.text


# uploads


class SlowClient:
    """Sends what it is given, and the rest of a body only when told."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.more = asyncio.Event()
        self.asked = 0
        self.reply = Reply()

    async def receive(self) -> Message:
        self.asked += 1
        if not self.messages:
            await self.more.wait()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.reply.messages.append(message)

    def go_on(self, *messages: Message) -> None:
        self.messages += messages
        self.more.set()


def part(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": True}


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """As an app does with a request that has no key."""
    await send({"type": "http.response.start", "status": 401, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


async def times_out(scope: Scope, receive: Receive, send: Send) -> None:
    """As an app does with an upload that stalls."""
    try:
        while (await asyncio.wait_for(receive(), 0.01)).get("more_body"):
            pass
    except TimeoutError:
        await send({"type": "http.response.start", "status": 408, "headers": []})
        await send({"type": "http.response.body", "body": b"too slow"})


@pytest.mark.parametrize(("app", "status"), [(refuse, 401), (times_out, 408)], ids=["refused", "timed out"])
async def test_the_host_may_end_an_upload_that_never_comes(app: Any, status: int) -> None:
    """The body is waited for only a moment; what is held of it is given back."""
    slow = SlowClient(part(b"{" * 1000))
    async with KVCacheMiddleware(app, endpoints=ENGINES) as under_test:
        await asyncio.wait_for(under_test(http_scope(CHAT, method="POST"), slow.receive, slow.send), 5)
        held = under_test.metrics.registry.get_sample_value("kvproxy_bodies_held_bytes")
    assert (slow.reply.status, held) == (status, 0)


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_by_the_host() -> None:
    """`Expect: 100-continue`: the first receive tells the client to send."""
    slow = SlowClient()
    async with KVCacheMiddleware(refuse, endpoints=ENGINES) as under_test:
        scope = http_scope(CHAT, method="POST", headers=[(b"expect", b"100-continue")])
        await under_test(scope, slow.receive, slow.send)
    assert (slow.reply.status, slow.asked) == (401, 0)


async def slowly(app: Any, body: bytes = raw(TURN), *, expect: bool = False) -> Reply:
    """Send a request whose body comes after the app was called."""
    called = asyncio.Event()
    slow = SlowClient(*([] if expect else [part(body[:50])]))
    rest = body if expect else body[50:]

    headers = [(b"expect", b"100-continue")] if expect else []
    running = asyncio.create_task(
        app(http_scope(CHAT, method="POST", headers=headers, called=called), slow.receive, slow.send)
    )
    await called.wait()
    slow.go_on(part(rest), END)
    await running
    return slow.reply


def calling(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Any:
    """Tells the client above when the app is called."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        scope["called"].set()
        await app(scope, receive, send)

    return wrapped


@pytest.mark.parametrize("expect", [False, True], ids=["slow", "asked for"])
async def test_a_body_that_comes_late_has_its_facts_when_the_app_has_read_it(expect: bool) -> None:
    app = Serving()
    async with KVCacheMiddleware(calling(app), endpoints=ENGINES) as under_test:
        for _ in range(2):
            assert (await slowly(under_test, expect=expect)).status == 200
        held = under_test.metrics.registry.get_sample_value("kvproxy_bodies_held_bytes")
    assert app.seen == [None, "b"]
    assert app.bodies == [raw(TURN)] * 2
    assert held == 0


async def test_of_a_late_body_that_is_over_a_limit_nothing_is_kept() -> None:
    app = Serving()
    async with KVCacheMiddleware(calling(app), endpoints=ENGINES, limit_bytes=60) as under_test:
        await slowly(under_test)
    async with KVCacheMiddleware(calling(app), endpoints=ENGINES, limit_all_bytes=60) as under_test:
        await slowly(under_test)
        held = under_test.metrics.registry.get_sample_value("kvproxy_bodies_held_bytes")
    assert app.bodies == [raw(TURN)] * 2
    assert (app.seen, held) == ([None, None], 0)


async def test_a_mistake_with_a_late_body_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    app = Serving()
    async with KVCacheMiddleware(calling(app), endpoints=ENGINES) as under_test:
        under_test.service.overlap.indexes.clear()
        assert (await slowly(under_test)).status == 200
    assert app.bodies == [raw(TURN)]
    assert "no facts for this request" in caplog.text


# states that requests share


async def test_requests_that_share_a_state_do_not_see_each_others_ids() -> None:
    """Some test harnesses give all requests one dict."""
    app, state = Serving(), {"db": 1}
    async with KVCacheMiddleware(app, endpoints=ENGINES) as under_test:
        await chat(under_test, state=state)
        await chat(under_test, state=state)
        await chat(under_test, state=state, body=raw("something that was never seen " * 100))
        scope = http_scope("/other", state=state)
        await call(under_test, scope)
    assert app.seen == [None, "b", None, None]
    assert scope["state"] == {"db": 1, "llm_served_endpoint_id": "b"}


async def test_requests_at_once_on_one_state_do_not_see_each_others_ids() -> None:
    """Nor is one learned where the other was served."""
    state: dict[str, Any] = {}
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["headers"]:
            kvproxy.served(scope, "a")
            go.set()
        else:
            await go.wait()
        await Inner()(scope, receive, send)

    under_test = KVCacheMiddleware(app, endpoints=ENGINES)
    async with under_test:
        silent = asyncio.create_task(chat(under_test, state=state, body=raw("silent " * 600)))
        await asyncio.sleep(0)
        await chat(under_test, state=state, headers=[(b"x-tells", b"1")])
        await silent
        assert under_test.service.overlap.indexes["default"].approximate.counts.endpoints == ("a",)
        entries = under_test.service.overlap.indexes["default"].approximate.counts.entries
        await chat(under_test, state={}, headers=[(b"x-tells", b"1")])
        assert under_test.service.overlap.indexes["default"].approximate.counts.entries == entries


async def test_of_two_middlewares_each_keeps_its_own_ids() -> None:
    """The inner one prefers nothing that the outer one found, and what the app says it served is the inner one's."""
    app = Serving(headers=[(b"x-kvproxy-endpoint", b"a")])  # as the outer one is told
    inner = KVCacheMiddleware(app, endpoints={"x": ENGINES["a"]})
    outer = KVCacheMiddleware(inner, endpoints=ENGINES)
    async with inner, outer:
        await chat(outer)
        await chat(outer)
    assert app.seen == [None, None]


# its arguments, and the header


@pytest.mark.parametrize("wrong", ["plenty", None, -1, 1.5], ids=str)
@pytest.mark.parametrize("name", ["limit_bytes", "limit_all_bytes"])
def test_a_limit_that_is_no_size_is_refused_at_once(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        KVCacheMiddleware(Serving(), endpoints=ENGINES, **{name: wrong})


async def test_a_limit_may_be_written_as_everywhere_else() -> None:
    app = Serving()
    async with KVCacheMiddleware(app, endpoints=ENGINES, limit_bytes="32MiB") as under_test:
        assert (await chat(under_test)).status == 200


@pytest.mark.parametrize("enabled", [True, False])
async def test_no_client_sets_the_preference_header_on_any_path(enabled: bool) -> None:
    inner = Inner()
    settings = {"preference_header": "X-KV", "enabled": enabled}
    async with KVCacheMiddleware(inner, endpoints=ENGINES, settings=settings) as under_test:
        headers = [(b"x-kv", b"evil"), (b"accept", b"*/*")]
        for path in ("/chat", "/llm/v1/chat/completions", CHAT):
            await call(under_test, http_scope(path, method="POST", headers=headers), body=raw(TURN))
    assert [dict(scope["headers"]) for scope in inner.scopes] == [{b"accept": b"*/*"}] * 3
