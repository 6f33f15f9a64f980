"""KVCacheMiddleware where hosts differ: prefixes, slow answers, engines that die, starts and ends."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import time
import weakref
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import kvproxy
from kvproxy import ConfigError, KVCacheMiddleware
from kvproxy.base.types import Headers
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.embed.paths import kind_of_end
from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange
from kvproxy.proxy.request.observer import RequestObserver
from tests.cache.support import NOWHERE, long_text
from tests.support.until import until

ENGINES = {"a": NOWHERE, "b": NOWHERE}
CHAT = "/v1/chat/completions"
TURN = {"model": "m", "messages": [{"role": "user", "content": long_text("w")}]}


async def answer(request: Request) -> JSONResponse:
    """Serve from b, and answer with the known facts."""
    await request.body()
    found = {"preferred": kvproxy.preferred(request), "matches": dict(kvproxy.matches(request))}
    kvproxy.served(request, "b")
    return JSONResponse(found)


def client(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, **options), base_url="http://app")


async def ask_twice(app: ASGIApp, path: str, **options: Any) -> Any:
    async with client(app, **options) as http:
        await http.post(path, json=TURN)
        return (await http.post(path, json=TURN)).json()


# where the inference routes are


@pytest.mark.parametrize(
    "path",
    ["/llm/v1/chat/completions", "/api/v1/chat/completions", "/chat/completions", "/deployments/m/chat/completions"],
)
async def test_below_any_prefix(path: str) -> None:
    app = Starlette(routes=[Route(path, answer, methods=["POST"])])
    found = await ask_twice(KVCacheMiddleware(app, endpoints=ENGINES), path)
    assert found["preferred"] == "b"
    assert found["matches"].keys() == {"b"}


async def test_in_a_mounted_app_and_below_the_servers_root() -> None:
    inner = Starlette(
        routes=[Route(CHAT, answer, methods=["POST"])], middleware=[Middleware(KVCacheMiddleware, endpoints=ENGINES)]
    )
    found = await ask_twice(Starlette(routes=[Mount("/llm", inner)]), f"/llm{CHAT}")
    assert found["preferred"] == "b"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", "completion"),
        ("/x/v1/messages", "messages"),
        ("/messages", None),
        ("/responses", None),
        ("/", None),
    ],
)
def test_the_end_of_a_path_tells_the_kind(path: str, kind: str | None) -> None:
    assert kind_of_end(path) == kind


async def test_paths_may_be_named_and_what_is_missed_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = Starlette(routes=[Route("/ask", answer, methods=["POST"]), Route(CHAT, answer, methods=["POST"])])
    middleware = KVCacheMiddleware(app, endpoints=ENGINES, paths={"/ask": "chat"})
    assert (await ask_twice(middleware, "/ask"))["preferred"] == "b"
    with caplog.at_level(logging.WARNING):
        assert (await ask_twice(middleware, CHAT))["preferred"] is None
    assert len([each for each in caplog.messages if "looks like inference" in each]) == 1
    assert middleware.status()["not_covered"] == CHAT


def test_a_path_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"paths\./ask"):
        KVCacheMiddleware(Starlette(), endpoints=ENGINES, paths=["/ask"])


# what the host sees


async def test_outer_middlewares_see_the_route_and_what_inner_ones_left() -> None:
    seen: list[Scope] = []

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await middleware(scope, receive, send)

    app = Starlette(routes=[Route(CHAT, answer, methods=["POST"])])
    middleware = KVCacheMiddleware(app, endpoints=ENGINES)
    async with client(outer) as http:
        await http.post(CHAT, json=TURN)
    assert seen[0]["endpoint"] is answer
    assert SCOPE_KEY not in seen[0]


async def test_filters_of_its_own_see_what_is_known() -> None:
    tokens: list[int] = []

    def counting(inner: ASGIApp) -> ASGIApp:
        async def filtered(scope: Scope, receive: Receive, send: Send) -> None:
            facts = scope[SCOPE_KEY].facts
            tokens.append(0 if facts is None else facts.prompt_tokens)
            await inner(scope, receive, send)

        return filtered

    app = Starlette(routes=[Route(CHAT, answer, methods=["POST"])])
    await ask_twice(KVCacheMiddleware(app, endpoints=ENGINES, filters=[counting]), CHAT)
    assert len(tokens) == 2
    assert all(tokens)


async def test_observers_of_filters_see_the_answer() -> None:
    seen: list[str] = []

    class Watching(RequestObserver):
        def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
            seen.append(f"head {status}")

        def body_piece(self, exchange: Exchange, piece: bytes) -> None:
            seen.append("piece")

        def ended(self, exchange: Exchange, status: int, crash: str) -> None:
            seen.append(f"end {status} {crash}")

    def watching(inner: ASGIApp) -> ASGIApp:
        async def filtered(scope: Scope, receive: Receive, send: Send) -> None:
            scope[SCOPE_KEY].attach(Watching())
            await inner(scope, receive, send)

        return filtered

    async def fails(request: Request) -> JSONResponse:
        raise KeyError

    routes = [Route(CHAT, answer, methods=["POST"]), Route("/v1/completions", fails, methods=["POST"])]
    async with client(KVCacheMiddleware(Starlette(routes=routes), endpoints=ENGINES, filters=[watching])) as http:
        await http.post(CHAT, json=TURN)
        with pytest.raises(KeyError):
            await http.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert seen == ["head 200", "piece", "end 200 ", "head 500", "piece", "end 500 KeyError"]


async def test_of_a_request_that_is_over_nothing_waits_for_the_garbage_collector() -> None:
    class Kept:
        pass

    left: list[weakref.ref[Kept]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        scope["state"]["kept"] = kept = Kept()
        left.append(weakref.ref(kept))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    gc.disable()
    try:
        async with client(KVCacheMiddleware(app, endpoints=ENGINES)) as http:
            await http.post(CHAT, json=TURN)
    finally:
        gc.enable()
    assert [one() for one in left] == [None]


async def test_status_tells_why_nothing_was_preferred() -> None:
    app = Starlette(routes=[Route(CHAT, answer, methods=["POST"])])
    middleware = KVCacheMiddleware(app, endpoints=ENGINES)
    assert middleware.status()["running"] is False
    async with client(middleware) as http:
        await http.post(CHAT, content=b"{")
    await ask_twice(middleware, CHAT)
    found = middleware.status()
    assert found["running"] is True
    assert [found[name] for name in ("requests", "unread", "unknown", "preferred")] == [3, 1, 1, 1]
    assert found["endpoints"] == {"a": "up", "b": "up"}


async def test_status_counts_each_reason_once() -> None:
    """Also of a body that arrives while the app reads it."""
    app = Starlette(routes=[Route(CHAT, answer, methods=["POST"])])
    middleware = KVCacheMiddleware(app, endpoints=ENGINES)
    async with middleware, client(middleware) as http:
        await http.post(CHAT, json={"model": "m", "messages": [{"role": "user", "content": "short"}]})
        await http.post(CHAT, json=TURN, headers={"expect": "100-continue"})
        for _ in range(3):
            middleware._cluster.verdicts.record_outcome(
                middleware._cluster.endpoints[1].engine, AttemptOutcome.FAILURE, time.monotonic()
            )
        await http.post(CHAT, json=TURN)
    await ask_twice(middleware, CHAT)
    found = middleware.status()
    reasons = ("short", "unknown", "down", "not_running", "unread", "preferred")
    assert [found[name] for name in reasons] == [1, 1, 1, 2, 0, 0]
    assert found["requests"] == 5


# when it learns


async def test_a_prompt_counts_as_placed_from_served_on() -> None:
    """Parallel sub-agents with one prompt find each other while the first answer streams."""
    go_on = asyncio.Event()
    begun = asyncio.Event()

    async def slow(request: Request) -> StreamingResponse:
        await request.body()
        found = kvproxy.preferred(request)
        kvproxy.served(request, "b")

        async def pieces() -> Any:
            yield str(found).encode()
            begun.set()
            await go_on.wait()

        return StreamingResponse(pieces())

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, slow, methods=["POST"])]), endpoints=ENGINES)
    async with client(app) as http:
        first = asyncio.create_task(http.post(CHAT, json=TURN))
        await begun.wait()
        go_on_later = asyncio.create_task(http.post(CHAT, json=TURN))
        await until(lambda: app.status()["requests"] == 2)
        go_on.set()
        assert (await first).text == "None"
        assert (await go_on_later).text == "b"


async def test_it_learns_at_the_end_of_the_answer_not_of_the_host() -> None:
    """A background task of the host delays no learning."""
    go_on = asyncio.Event()
    over = asyncio.Event()

    async def chat(request: Request) -> JSONResponse:
        await request.body()
        found = kvproxy.preferred(request)
        return JSONResponse(found, headers={"x-kvproxy-endpoint": "b"}, background=BackgroundTask(go_on.wait))

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                over.set()

        await app(scope, receive, sending)

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, chat, methods=["POST"])]), endpoints=ENGINES)
    async with client(watched) as http:
        first = asyncio.create_task(http.post(CHAT, json=TURN))
        await over.wait()
        over.clear()
        second = asyncio.create_task(http.post(CHAT, json=TURN))
        await over.wait()
        go_on.set()
        assert (await first).json() is None
        assert (await second).json() == "b"


# engines that die


async def test_an_engine_that_fails_is_not_named() -> None:
    async def dies(request: Request) -> JSONResponse:
        await request.body()
        found = kvproxy.preferred(request)
        kvproxy.served(request, "b")
        return JSONResponse(found, status_code=502 if len(asked) > 1 else 200)

    asked: list[int] = []
    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, dies, methods=["POST"])]), endpoints=ENGINES)
    async with client(app) as http:
        found = []
        for turn in range(6):
            asked.append(turn)
            found.append((await http.post(CHAT, json=TURN)).json())
    assert found[1] == "b"
    assert found[-1] is None
    conditions = app.status()["endpoints"]
    assert isinstance(conditions, dict)
    assert conditions["b"] == "ejected"


async def test_a_failure_may_be_reported() -> None:
    async def fails(request: Request) -> JSONResponse:
        await request.body()
        for _ in range(3):
            kvproxy.failed(request, "b")
        return JSONResponse(dict(kvproxy.matches(request)))

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, fails, methods=["POST"])]), endpoints=ENGINES)
    async with client(app) as http:
        assert (await http.post(CHAT, json=TURN)).json() == {}
    conditions = app.status()["endpoints"]
    assert isinstance(conditions, dict)
    assert conditions["b"] == "ejected"


async def test_an_unknown_endpoint_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def wrong(request: Request) -> JSONResponse:
        await request.body()
        kvproxy.served(request, "http://b:8000")
        return JSONResponse({})

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, wrong, methods=["POST"])]), endpoints=ENGINES)
    async with client(app) as http:
        await http.post(CHAT, json=TURN)
    assert "no endpoint has the id 'http://b:8000' (known: a, b)" in caplog.text


# its life


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": {"lmcache_endpoint": "nope"}}, "settings.lmcache_endpoint"),
        ({"settings": {"cache_strategy": {"enable_pinning": True}}}, "settings.cache_strategy.enable_pinning: needs"),
    ],
)
def test_configurations_refused_by_check_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        KVCacheMiddleware(Starlette(), endpoints=ENGINES, **options)
    assert words in str(raised.value)


async def test_after_its_end_a_late_request_does_not_start_it() -> None:
    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, answer, methods=["POST"])]), endpoints=ENGINES)
    async with app:
        assert (await ask_twice(app, CHAT))["preferred"] == "b"
    assert (await ask_twice(app, CHAT))["preferred"] is None
    assert app.status()["running"] is False
    async with app:
        assert (await ask_twice(app, CHAT))["preferred"] == "b"


async def test_it_ends_with_the_last_that_holds_it() -> None:
    """A lifespan within an open `async with` does not end it."""
    app = KVCacheMiddleware(Starlette(), endpoints=ENGINES)
    async with app:
        async with app:
            pass
        assert app.status()["running"] is True
    assert app.status()["running"] is False


async def test_two_with_the_same_endpoints_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    one, two = (KVCacheMiddleware(Starlette(), endpoints=ENGINES) for _ in range(2))
    async with one, two:
        assert "2 middlewares run with equal endpoints" in caplog.text


async def test_its_tasks_keep_nothing_of_the_request_that_started_it() -> None:
    correlation = contextvars.ContextVar("correlation", default="")
    seen: list[str] = []

    def clock() -> float:
        if asyncio.current_task() is not None and asyncio.current_task() is not here:
            seen.append(correlation.get())
        return time.monotonic()

    here = asyncio.current_task()
    correlation.set("the first request")
    async with KVCacheMiddleware(Starlette(), endpoints=ENGINES, clock=clock):
        await until(lambda: seen)
    assert set(seen) == {""}
