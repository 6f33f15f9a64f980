"""The shield before requests that other programs carry: `Router`, `/pick` and `KVCacheMiddleware`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import kvproxy
from kvproxy import KVCacheMiddleware, NoEndpoint, Router
from kvproxy.app import Proxy
from kvproxy.features.shield.rules import Rule
from kvproxy.operate.admin.pick import PickRoutes
from kvproxy.operate.admin.replies import RequestRefused, on_refused
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.filters.chain import RequestGuard
from tests.features.shield.test_shield import HOSTILE_N, NEW, OLD, RESPONSES, with_n
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve

CHAT = "/v1/chat/completions"
QUESTION = b'{"request":%s,"reserve":true}' % with_n("1000000", '"\\u006e"')
#: By path, with the member that some engine does not bear.
HOSTILE_PATHS = {
    "/v1/completions": {"prompt": ["a", "b"], "n": 1e9},
    "/v1/completions with a connector": {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_prefill": True}},
    "/v1/responses": {"input": "x", "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    "/v1/messages": {"messages": [], "max_tokens": 5, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "x"}]], "n": "1_000_000"},
    "/v1/embeddings": {"input": "x", "prompt_embeds": "AAAA"},
}


@contextlib.asynccontextmanager
async def engines(*versions: str) -> AsyncIterator[dict[str, str]]:
    """Yield the addresses of engines of these versions by their ids."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            f"e{number}": await stack.enter_async_context(serve(FakeEngine(f"e{number}", version=version)))
            for number, version in enumerate(versions)
        }


def config_of(urls: dict[str, str], shield: str = "refuse") -> dict[str, Any]:
    return {"endpoints": urls, "policy": "round_robin", "health": {"active": False}, "shield": shield}


def counted(proxy: Any, rule: Rule, action: str) -> float:
    labels = {"rule": rule.value, "action": action}
    return proxy.metrics.registry.get_sample_value("kvproxy_shield_requests_total", labels) or 0.0


@pytest.mark.parametrize("body", HOSTILE_N.values(), ids=HOSTILE_N)
async def test_a_router_refuses_a_huge_n_however_it_is_written(body: bytes) -> None:
    """The reason is the proxy's own, and no place is held."""
    async with engines(OLD) as urls, Router(config_of(urls)) as router:
        with pytest.raises(NoEndpoint) as raised:
            async with router.place(body):
                pass
        assert (raised.value.status, raised.value.reason) == (400, "shield")
        assert counted(router.proxy, Rule.HUGE_N, "refused") == 1
        assert [one.load.in_flight for one in router.proxy.clusters["default"].endpoints] == [0]


@pytest.mark.parametrize("path", HOSTILE_PATHS)
async def test_a_router_guards_every_path(path: str) -> None:
    """Also those whose bodies no placement needs."""
    async with engines(OLD) as urls, Router(config_of(urls)) as router:
        with pytest.raises(NoEndpoint) as raised:
            async with router.place({"model": "m", **HOSTILE_PATHS[path]}, path=path.split()[0]):
                pass
        assert raised.value.reason == "shield"
        async with router.place({"model": "m", "prompt": "x"}, path=path.split()[0]) as placed:
            assert placed.endpoint == "e0"


async def test_a_router_prefers_an_engine_without_the_fault() -> None:
    """Whatever the policy would have chosen, and after a failure as well."""
    async with engines(OLD, NEW, OLD) as urls, Router(config_of(urls)) as router:
        for _ in range(4):
            async with router.place(with_n("1000000")) as placed:
                assert placed.endpoint == "e1"
        async with router.place(with_n("1000000")) as placed:
            with pytest.raises(NoEndpoint):
                await placed.again()
        assert counted(router.proxy, Rule.HUGE_N, "rerouted") == 5


async def test_with_warn_a_router_places_and_counts() -> None:
    async with engines(OLD) as urls, Router(config_of(urls, "warn")) as router:
        await _ask_versions(router.proxy)
        async with router.place(with_n("1000000")) as placed:
            assert placed.endpoint == "e0"
        assert counted(router.proxy, Rule.HUGE_N, "passed") == 1


async def test_scores_need_an_id_that_no_client_chose() -> None:
    """The app gets it with the headers for the engine; other paths have none."""
    async with engines("0.29.0") as urls, Router(config_of(urls)) as router:
        async with router.place({"model": "m"}, path="/v1/score", headers={"x-request-id": "mine"}) as placed:
            assert len(placed.headers["x-request-id"]) == 32
        async with router.place({"model": "m"}, headers={"x-request-id": "mine"}) as placed:
            assert "x-request-id" not in placed.headers


async def test_a_question_to_pick_is_guarded() -> None:
    """400 without a reservation; an engine without the fault is named."""
    async with engines(OLD, NEW) as urls:
        for served, status in (({"e0": urls["e0"]}, 400), (urls, 201)):
            async with Proxy(load_config(config_of(served))) as proxy, admin_client(proxy) as client:
                answer = await client.post("/pick", content=QUESTION)
                assert answer.status_code == status, answer.text
                if status == 201:
                    assert answer.json()["endpoint"] == "e1"
                else:
                    assert "could harm" in answer.text
                    assert [one.load.in_flight for one in proxy.clusters["default"].endpoints] == [0]


def admin_client(proxy: Proxy) -> httpx.AsyncClient:
    app = Starlette(routes=PickRoutes(proxy).list_routes(), exception_handlers={RequestRefused: on_refused})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


async def _ask_versions(proxy: Proxy) -> None:
    for guard in proxy.guards:
        await guard._versions.ask()  # type: ignore[attr-defined]


async def choosing(request: Request) -> JSONResponse:
    """Answer with the endpoint, or as the proxy would refuse."""
    await request.body()
    preferred = kvproxy.preferred(request)
    try:
        return JSONResponse({"endpoint": await kvproxy.choose(request), "preferred": preferred})
    except NoEndpoint as why:
        return JSONResponse({"error": str(why), "preferred": preferred}, why.status)


@contextlib.asynccontextmanager
async def hosted(urls: dict[str, str], **options: Any) -> AsyncIterator[tuple[KVCacheMiddleware, httpx.AsyncClient]]:
    """Yield a middleware around an app that chooses, and a client of it."""
    app = Starlette(routes=[Route(CHAT, choosing, methods=["POST"]), Route(RESPONSES, choosing, methods=["POST"])])
    middleware = KVCacheMiddleware(app, endpoints=urls, **options)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://app")
    async with middleware, client:
        yield middleware, client


@pytest.mark.parametrize("body", HOSTILE_N.values(), ids=HOSTILE_N)
async def test_the_middleware_names_no_engine_for_a_huge_n(body: bytes) -> None:
    """`choose` raises what the app can answer with."""
    async with engines(OLD) as urls, hosted(urls, shield="refuse") as (middleware, client):
        answer = await client.post(CHAT, content=body)
        assert answer.status_code == 400, answer.text
        assert "could harm" in answer.json()["error"]
        assert counted(middleware, Rule.HUGE_N, "refused") == 1
        assert middleware.status()["refused"] == 1


async def test_the_middleware_names_an_engine_without_the_fault() -> None:
    """Also as `preferred`, even if another one holds the prompt."""
    async with engines(OLD, NEW) as urls, hosted(urls, shield="refuse") as (_, client):
        for _ in range(3):
            answer = (await client.post(CHAT, content=with_n("1000000"))).json()
            assert answer["endpoint"] == "e1"
            assert answer["preferred"] in (None, "e1")


def guards_of(middleware: KVCacheMiddleware) -> Sequence[RequestGuard]:
    """Return those of the running event loop."""
    life = middleware._hosted.find_life()
    assert life is not None
    assert life.filters is not None
    return life.filters.guards


async def test_the_middleware_warns_by_default() -> None:
    """The request passes and is counted; `off` asks no engine."""
    async with engines(OLD) as urls, hosted(urls) as (middleware, client):
        (guard,) = guards_of(middleware)
        hostile = {"model": "m", "input": "x", "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
        await guard._versions.ask()  # type: ignore[attr-defined]
        answer = await client.post(RESPONSES, content=json.dumps(hostile).encode())
        assert answer.json()["endpoint"] == "e0"
        assert counted(middleware, Rule.RESPONSES_CHAT_TEMPLATE, "passed") == 1
    async with hosted(urls, shield="off") as (middleware, client):
        assert guards_of(middleware) == ()


async def test_a_body_that_comes_late_is_examined_too() -> None:
    """Once the app has read it."""

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"model":"m","messages":[],'
        yield b'"n":1000000}'

    async with engines(OLD) as urls, hosted(urls, shield="refuse") as (_, client):
        answer = await client.post(CHAT, content=slow(), headers={"expect": "100-continue"})
        assert answer.status_code == 400
