"""KVCacheMiddleware in plain Starlette and FastAPI apps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Any, cast

import fastapi
import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import kvproxy
from kvproxy import KVCacheMiddleware
from kvproxy.base.errors import ConfigError, QueueFull
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.router_queue import RouterQueue
from kvproxy.cluster.settings import EndpointSettings
from tests.cache.fleet import simulated
from tests.cache.support import NOWHERE, long_text
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.until import until

ENGINES = {"a": NOWHERE, "b": NOWHERE}
CHAT = "/v1/chat/completions"
TURN = long_text("w")
USAGE = {"prompt_tokens": 600, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


def body(*contents: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents], **fields}


def raw(*contents: str) -> bytes:
    return json.dumps(body(*contents)).encode()


async def answer(request: Request) -> JSONResponse:
    """Serve any request from b, and answer with the preferred endpoint."""
    kvproxy.served(request, "b")
    return JSONResponse({"preferred": kvproxy.preferred(request), "got": len(await request.body()), "usage": USAGE})


def starlette_app(**options: Any) -> Starlette:
    middleware = Middleware(KVCacheMiddleware, endpoints=ENGINES, **options)
    return Starlette(routes=[Route(CHAT, answer, methods=["POST"])], middleware=[middleware])


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app")


def test_it_is_imported_from_the_package() -> None:
    assert kvproxy.KVCacheMiddleware is KVCacheMiddleware
    with pytest.raises(AttributeError, match="nonsense"):
        kvproxy.nonsense  # noqa: B018


async def test_in_a_starlette_app_a_chat_finds_its_engine() -> None:
    """Preferred from the second turn on, by nothing but what the app said it had used."""
    async with client(starlette_app()) as http:
        first = (await http.post(CHAT, json=body(TURN))).json()
        second = (await http.post(CHAT, json=body(TURN, "and now?"))).json()
    assert first["preferred"] is None
    assert second["preferred"] == "b"
    assert first["got"] == len(httpx.Request("POST", "http://x", json=body(TURN)).content)


async def test_a_follow_up_of_a_response_goes_where_it_was_served() -> None:
    """By the id that the app's answer begins with."""

    async def respond(request: Request) -> JSONResponse:
        kvproxy.served(request, "b")
        usage = {"input_tokens": 900, "output_tokens": 5}
        return JSONResponse({"id": "resp_1", "preferred": kvproxy.preferred(request), "usage": usage})

    path = "/v1/responses"
    middleware = Middleware(KVCacheMiddleware, endpoints=ENGINES)
    async with client(Starlette(routes=[Route(path, respond, methods=["POST"])], middleware=[middleware])) as http:
        asked = [{}, {"previous_response_id": "resp_1"}, {"previous_response_id": "resp_2"}]
        answers = [(await http.post(path, json={"model": "m", "input": "hi", **more})).json() for more in asked]
    assert [answer["preferred"] for answer in answers] == [None, "b", None]


async def test_in_a_fastapi_app() -> None:
    app = fastapi.FastAPI()
    app.add_middleware(KVCacheMiddleware, endpoints=ENGINES)

    @app.post(CHAT)
    async def served(request: fastapi.Request, chat: dict[str, Any]) -> dict[str, Any]:
        request.state.llm_served_endpoint_id = "a"
        return {"preferred": getattr(request.state, "llm_preferred_endpoint_id", None), "model": chat["model"]}

    async with client(app) as http:
        await http.post(CHAT, json=body(TURN))
        assert (await http.post(CHAT, json=body(TURN))).json() == {"preferred": "a", "model": "m"}


async def test_a_pure_asgi_app_asks_and_tells_by_its_scope() -> None:
    """Also behind a middleware of its own that copies the scope."""
    seen: list[str | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope}
        seen.append(kvproxy.preferred(scope))
        kvproxy.served(scope, "b")
        await Inner()(scope, receive, send)

    under_test = KVCacheMiddleware(app, endpoints=ENGINES)
    async with under_test:
        for _ in range(2):
            await call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN))
    assert seen == [None, "b"]


async def test_a_request_may_be_a_mapping_that_only_reads() -> None:
    """As baize's is."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        request = MappingProxyType(scope)
        kept = kvproxy.preferred(request)
        kvproxy.served(request, "b")
        await JSONResponse(kept)(scope, receive, send)

    assert kvproxy.preferred(MappingProxyType({"type": "http"})) is None
    async with KVCacheMiddleware(app, endpoints=ENGINES) as under_test, client(under_test) as http:
        assert [(await http.post(CHAT, json=body(TURN))).json() for _ in range(2)] == [None, "b"]


async def test_the_endpoint_that_served_may_be_told_by_header() -> None:
    """As kvproxy's own router does."""

    async def served(request: Request) -> Response:
        return PlainTextResponse("ok", headers={"x-kvproxy-endpoint": "a"})

    under_test = KVCacheMiddleware(Starlette(routes=[Route(CHAT, served, methods=["POST"])]), endpoints=ENGINES)
    async with under_test, client(under_test) as http:
        await http.post(CHAT, json=body(TURN))
        assert under_test.service.overlap.indexes["default"].approximate.counts.endpoints == ("a",)


@pytest.mark.parametrize("name", [b"x-kvproxy-endpoint", b"X-Kvproxy-Endpoint"])
async def test_headers_of_an_answer_may_be_an_iterator_and_capitalized(name: bytes) -> None:
    """As Sanic sends them: the server and we read them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = iter([(name, b"a"), (b"x-other", b"b")])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    under_test = KVCacheMiddleware(app, endpoints=ENGINES)
    async with under_test, client(under_test) as http:
        answer = await http.post(CHAT, json=body(TURN))
        assert answer.headers["x-other"] == "b"
        assert under_test.service.overlap.indexes["default"].approximate.counts.endpoints == ("a",)


async def test_an_app_that_tells_nothing_teaches_nothing() -> None:
    inner = Inner()
    under_test = KVCacheMiddleware(inner, endpoints=ENGINES)
    async with under_test:
        for _ in range(2):
            await call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN))
    assert "llm_preferred_endpoint_id" not in inner.scopes[-1].get("state", {})


async def test_a_request_header_names_the_preferred_endpoint_and_no_client_can() -> None:
    inner = Inner(headers=[(b"x-kvproxy-endpoint", b"a")])
    under_test = KVCacheMiddleware(inner, endpoints=ENGINES, settings={"preference_header": "X-Preferred"})
    async with under_test:
        for _ in range(2):
            headers = [(b"x-preferred", b"mine"), (b"content-type", b"application/json")]
            await call(under_test, http_scope(CHAT, method="POST", headers=headers), body=raw(TURN))
    first, second = (dict(scope["headers"]).get(b"x-preferred") for scope in inner.scopes)
    assert (first, second) == (None, b"a")


async def test_failed_answers_teach_nothing() -> None:
    under_test = KVCacheMiddleware(Inner(status=503, headers=[(b"x-kvproxy-endpoint", b"a")]), endpoints=ENGINES)
    async with under_test:
        await call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN))
        assert under_test.service.overlap.indexes["default"].approximate.counts.entries == 0


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ([(b"content-length", b"999999999")], b"{}"),
        ([(b"content-encoding", b"gzip")], raw(TURN)),
        ([], b"not json"),
    ],
    ids=["too long", "encoded", "not json"],
)
async def test_unknown_shapes_pass_untouched(headers: Any, content: bytes) -> None:
    inner = Inner()
    async with KVCacheMiddleware(inner, endpoints=ENGINES, limit_bytes=10_000) as under_test:
        reply = await call(under_test, http_scope(CHAT, method="POST", headers=headers), body=content)
    assert (reply.status, inner.bodies) == (200, [content])


async def test_a_long_body_without_a_length_is_handed_on_whole() -> None:
    """It is read up to the limit only; the app gets every byte all the same, and nothing is answered for it."""
    inner = Inner()
    async with KVCacheMiddleware(inner, endpoints=ENGINES, limit_bytes=100) as under_test:
        pieces: list[Message] = [{"type": "http.request", "body": b"x" * 60, "more_body": True} for _ in range(4)]
        pieces.append({"type": "http.request", "body": b"end", "more_body": False})
        await call(under_test, http_scope(CHAT, method="POST"), *pieces)
    assert inner.bodies == [b"x" * 240 + b"end"]


async def test_a_body_in_pieces_is_handed_on_in_one() -> None:
    """They are put together as they come, once, for the app as well."""
    text, got = raw("hello"), list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        got.append(await receive())
        await Inner()(scope, receive, send)

    async with KVCacheMiddleware(app, endpoints=ENGINES) as under_test:
        pieces: list[Message] = [{"type": "http.request", "body": text[i : i + 9], "more_body": True} for i in (0, 9)]
        await call(under_test, http_scope(CHAT, method="POST"), *pieces, {"type": "http.request", "body": text[18:]})
    assert got == [{"type": "http.request", "body": text, "more_body": False}]


async def test_beyond_the_bound_of_all_bodies_one_is_handed_on_unread() -> None:
    """No request fails for it; what is held is shown, and given back when its request is over."""
    go = asyncio.Event()
    reading = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reading.set()
        await go.wait()
        await Inner()(scope, receive, send)

    async with KVCacheMiddleware(app, endpoints=ENGINES, limit_all_bytes=1000) as under_test:

        def held() -> float | None:
            return under_test.metrics.registry.get_sample_value("kvproxy_bodies_held_bytes")

        first = asyncio.create_task(call(under_test, http_scope(CHAT, method="POST"), body=b"x" * 900))
        await reading.wait()
        assert held() == 900
        pieces = [{"type": "http.request", "body": b"y" * 90, "more_body": True} for _ in range(3)]
        second = asyncio.create_task(
            call(under_test, http_scope(CHAT, method="POST"), *pieces, {"type": "http.request", "body": b"z"})
        )
        await asyncio.sleep(0)
        assert held() == 990
        go.set()
        assert [(await task).status for task in (first, second)] == [200, 200]
        assert held() == 0


async def test_a_client_that_leaves_while_sending_is_the_apps_business() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])

    async with KVCacheMiddleware(app, endpoints=ENGINES) as under_test:
        await call(under_test, http_scope(CHAT, method="POST"), {"type": "http.disconnect"})
    assert seen == ["http.disconnect"]


async def test_other_paths_and_scopes_pass() -> None:
    inner = Inner()
    async with KVCacheMiddleware(inner, endpoints=ENGINES) as under_test:
        await call(under_test, http_scope("/health"))
        await call(under_test, {"type": "websocket"})
    assert [scope["type"] for scope in inner.scopes] == ["http", "websocket"]


async def test_switched_off_it_only_passes() -> None:
    inner = Inner(headers=[(b"x-kvproxy-endpoint", b"a")])
    under_test = KVCacheMiddleware(inner, endpoints=ENGINES, settings=KvCacheSettings(enabled=False))
    for _ in range(2):
        await call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN))
    async with under_test:
        assert not tasks()
    assert under_test.service.overlap.indexes["default"].approximate.counts.entries == 0


async def test_an_app_that_fails_is_not_hidden() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the app's own")

    async with KVCacheMiddleware(broken, endpoints=ENGINES) as under_test:
        with pytest.raises(RuntimeError, match="the app's own"):
            await call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN))


async def test_a_mistake_in_it_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    inner = Inner()
    under_test = KVCacheMiddleware(inner, endpoints=ENGINES)
    async with under_test:
        under_test.service.overlap.indexes.clear()
        assert (await call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN))).status == 200
    assert "no facts for this request" in caplog.text


async def test_anthropic_usage_is_read_from_the_streams_head() -> None:
    """Its first event says how much of the prompt was cached."""
    start = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":10,"cache_read_input_tokens":590}}}\n\n'
    inner = Inner(headers=[(b"x-kvproxy-endpoint", b"a")], chunks=(start, b"x" * 40_000))
    async with KVCacheMiddleware(inner, endpoints=ENGINES) as under_test:
        for _ in range(2):
            await call(under_test, http_scope("/v1/messages", method="POST"), body=raw(TURN))
        sample = under_test.metrics.registry.get_sample_value
        labels = {"cluster": "default", "endpoint": "a", "source": "approximate", "result": "hit"}
        assert sample("kvproxy_kvcache_predictions_total", labels) == 1


# Its life


async def lifespan(app: Any) -> AsyncIterator[str]:
    """Drives the app through ASGI's lifespan: yields after the start, and once more after the end."""
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    outgoing: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "lifespan.startup"})
    running = asyncio.create_task(app({"type": "lifespan", "state": {}}, incoming.get, outgoing.put))
    yield (await outgoing.get())["type"]
    incoming.put_nowait({"type": "lifespan.shutdown"})
    yield (await outgoing.get())["type"]
    await running


def tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("kvcache")}


async def test_its_tasks_live_between_startup_and_shutdown() -> None:
    app = starlette_app()
    life = lifespan(app)
    assert await anext(life) == "lifespan.startup.complete"
    assert tasks() == {"kvcache watch", "kvcache event streams"}
    assert await anext(life) == "lifespan.shutdown.complete"
    assert not tasks()
    await anext(life, None)


async def test_without_lifespan_events_it_starts_with_the_first_request() -> None:
    inner = Inner()
    under_test = KVCacheMiddleware(inner, endpoints=ENGINES)
    await asyncio.gather(*(call(under_test, http_scope(CHAT, method="POST"), body=raw(TURN)) for _ in range(5)))
    assert tasks() == {"kvcache watch", "kvcache event streams"}
    await under_test.__aexit__(None, None, None)
    await under_test.__aexit__(None, None, None)  # leaving twice is leaving once
    assert not tasks()


async def test_strategies_run_after_the_response(caplog: pytest.LogCaptureFixture) -> None:
    """The whole of it in another app: lookup, preference, pin - against simulated engines and controller."""
    async with simulated() as place:
        endpoints = [EndpointSettings(id=name, url=url) for name, url in place.engines.items()]
        settings = {
            "lmcache_endpoint": place.lmcache,
            "lookup_routing_timeout": 60,
            "engine_metrics_interval": 0,
            "cache_strategy": {"enable_pinning": True, "hot_content_threshold": 2},
        }

        async def forward(request: Request) -> Response:
            engine = getattr(request.state, "llm_preferred_endpoint_id", "b")
            request.state.llm_served_endpoint_id = engine
            async with httpx.AsyncClient(trust_env=False) as http:
                reply = await http.post(place.engines[engine] + CHAT, content=await request.body())

            async def pieces() -> AsyncIterator[bytes]:
                yield reply.content

            return StreamingResponse(pieces(), headers={"x-engine": engine})

        under_test = KVCacheMiddleware(
            Starlette(routes=[Route(CHAT, forward, methods=["POST"])]), endpoints=endpoints, settings=settings
        )
        with caplog.at_level(logging.INFO, "kvproxy.audit"):
            async with under_test, client(under_test) as http:
                asked = {**body(TURN), "model": "tiny", "max_tokens": 1}
                engines = [(await http.post(CHAT, json=asked)).headers["x-engine"] for _ in range(3)]
                await until(lambda: place.calls["POST /pin"] == 1)
        assert engines == ["b", "b", "b"]
        assert "action=pin instance=b" in caplog.text


async def test_the_proxys_own_decision_spreads_what_begins_alike() -> None:
    """A request in flight counts until its response ends: equal prompts at once do not all go to one engine."""
    go_on, engines = asyncio.Event(), list[str | None]()

    async def forward(request: Request) -> JSONResponse:
        await request.body()
        engines.append(await kvproxy.choose(request))
        await go_on.wait()
        return JSONResponse({"usage": USAGE})

    routes = [Route(CHAT, forward, methods=["POST"])]
    app = KVCacheMiddleware(Starlette(routes=routes), endpoints=ENGINES, clock=FakeClock())  # all at one moment
    async with app, client(app) as http:
        asked = [asyncio.create_task(http.post(CHAT, json=body(TURN))) for _ in range(8)]
        await until(lambda: len(engines) == 8)
        loads = {one.id: one.load.in_flight for one in app._cluster.endpoints}
        go_on.set()
        await asyncio.gather(*asked)
        assert sum(loads.values()) == 8
        assert min(loads.values()) >= 2
        assert [one.load.in_flight for one in app._cluster.endpoints] == [0, 0]


async def test_a_session_without_room_is_asked_to_come_again() -> None:
    """By the exception that an app gets for every refusal."""
    raised: list[kvproxy.NoEndpoint] = []

    async def forward(request: Request) -> JSONResponse:
        await request.body()
        try:
            await kvproxy.choose(request)
        except kvproxy.NoEndpoint as why:
            raised.append(why)
        return JSONResponse({})

    class FullQueue:
        awaits = False

        def admits(self, *_: object) -> bool:
            return False

        async def wait(self, *_: object, **__: object) -> None:
            raise QueueFull(6.5)

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, forward, methods=["POST"])]), endpoints=ENGINES)
    async with app, client(app) as http:
        app._cluster.queue = cast("RouterQueue", FullQueue())
        assert (await http.post(CHAT, json=body(TURN, "one"))).status_code == 200
    assert [(one.status, one.retry_after_s) for one in raised] == [(429, 7.0)]


async def test_a_chosen_engine_is_learned_without_a_word() -> None:
    """The next turn goes there again; an engine that failed the request may be excluded."""
    engines: list[str | None] = []

    async def forward(request: Request) -> JSONResponse:
        await request.body()
        engine = await kvproxy.choose(request)
        engines.append(engine)
        if len(engines) == 3:
            engines.append(await kvproxy.choose(request, exclude=[str(engine)]))
            engines.append(await kvproxy.choose(request, exclude=["a", "b"]))
            engines.append(await kvproxy.choose(request, exclude="a"))
        return JSONResponse({"usage": USAGE})

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, forward, methods=["POST"])]), endpoints=ENGINES)
    async with app, client(app) as http:
        for tail in ("one", "two", "three"):
            await http.post(CHAT, json=body(TURN, tail))
        assert engines[0] == engines[1] == engines[2] != engines[3]
        assert {*engines[2:4]} == {"a", "b"}
        assert engines[4:] == [None, "b"]
        assert [one.load.in_flight for one in app._cluster.endpoints] == [0, 0]


async def test_an_app_that_fails_gives_the_place_back() -> None:
    async def forward(request: Request) -> JSONResponse:
        await kvproxy.choose(request)
        raise RuntimeError("no engine answers")

    app = KVCacheMiddleware(Starlette(routes=[Route(CHAT, forward, methods=["POST"])]), endpoints=ENGINES)
    async with app, client(app) as http:
        with pytest.raises(RuntimeError, match="no engine answers"):
            await http.post(CHAT, json=body(TURN))
    assert [one.load.in_flight for one in app._cluster.endpoints] == [0, 0]


async def test_choose_is_for_inference_requests() -> None:
    with pytest.raises(LookupError, match="behind KVCacheMiddleware"):
        await kvproxy.choose({"type": "http"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoints": {}}, "endpoints: there are none"),
        ({"endpoints": {"a": "nope"}}, "endpoints.a.url"),
        ({"endpoints": ["http://a:1"]}, "endpoints: must be a mapping of ids to URLs"),
        ({"endpoints": "http://a:1"}, "endpoints: must be a mapping of ids to URLs"),
        ({"endpoints": 5}, "endpoints: must be a mapping of ids to URLs"),
        ({"paths": "/ask"}, "paths: must be a list of paths"),
        ({"paths": 5}, "paths: must be a list of paths"),
        ({"paths": {"ask": "chat"}}, "paths.ask: must begin with /"),
        ({"filters": Inner()}, "filters: must be a list of ASGI middlewares"),
        ({"session_header": "x session"}, "session_header: no HTTP header has such a name"),
        ({"session_header": 5}, "session_header: must be text"),
        ({"metrics": 5}, "metrics: must be a Metrics of kvproxy"),
        ({"name": 5}, "name: must be text"),
        ({"settings": 5}, "settings: must be a mapping"),
        ({"settings": {"preference_header": "x\r\ny"}}, "settings.preference_header: no HTTP header has such a name"),
        ({"settings": {"lmcache_endpiont": "x"}}, "settings.lmcache_endpiont: unknown key"),
        ({"settings": {"min_matched_tokens": "many"}}, "settings.min_matched_tokens: must be a whole number"),
    ],
)
def test_mistakes_have_the_words_of_the_configuration_file(options: dict[str, Any], words: str) -> None:
    """Each with its path, and the nearest key."""
    with pytest.raises(ConfigError) as raised:
        KVCacheMiddleware(Inner(), **{"endpoints": ENGINES, **options})
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"settings": {"cache_strategy": {"evict_batch": 1}}},
            "settings.cache_strategy.evict_batch: ignored: no longer a setting",
        ),
        ({"endpoints": {"a": "http://a:1", "b": "http://a:1"}}, "endpoints[1].url: the same engine as 'a'"),
    ],
)
def test_warnings_of_check_are_logged(options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    """A configuration file with it loads."""
    KVCacheMiddleware(Inner(), **{"endpoints": ENGINES, **options})
    assert words in caplog.text
