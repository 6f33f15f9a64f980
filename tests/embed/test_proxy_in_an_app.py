"""`kvproxy.Proxy` mounted in another app: its tenants, its endpoints at run time, and its operator's apps."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import Mount
from starlette.types import ASGIApp, Send

import kvproxy
from kvproxy import Proxy
from kvproxy.embed.lives import background
from kvproxy.proxy.listener.server import Server
from tests.support.fake_engine import Call, FakeEngine, event, start_stream

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
NOWHERE = {"a": "http://127.0.0.1:9"}


class Keys(AuthenticationBackend):
    """Takes `Bearer NAME` for a user of this name."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        scheme, _, name = conn.headers.get("authorization", "").partition(" ")
        return (AuthCredentials(["user"]), SimpleUser(name)) if scheme == "Bearer" else None


@asynccontextmanager
async def host(proxy: Proxy, *mounts: Mount, auth: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an app that has the proxy at /llm."""
    middleware = [Middleware(AuthenticationMiddleware, backend=Keys())] if auth else []
    app = Starlette(routes=[Mount("/llm", proxy), *mounts], middleware=middleware)
    async with proxy, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client


# tenants


async def tenant_seen(
    headers: dict[str, str], config: dict[str, Any] | None = None, **options: Any
) -> tuple[str, Call]:
    """Send a chat through an app with its own authentication; the tenant it is counted for, and the engine's call."""
    engine = FakeEngine("a")
    async with Server(engine, drain_s=0.1) as server:
        proxy = Proxy({"endpoints": {"a": server.url}, **(config or {})}, **options)
        async with host(proxy, auth=True) as client:
            assert (await client.post(f"/llm{CHAT}", json=BODY, headers=headers)).status_code == 200
        decision = next(proxy.recent.latest())
    return decision.tenant, engine.calls[0]


async def test_the_hosts_user_is_the_tenant_and_its_credentials_stay_with_the_host() -> None:
    tenant, call = await tenant_seen({"authorization": "Bearer ann", "cookie": "session=1"})
    assert tenant == "ann"
    assert call.header("authorization") is None
    assert call.header("cookie") is None


async def test_a_user_that_is_not_authenticated_is_no_tenant() -> None:
    """Its credentials are for the engine, as without a host."""
    tenant, call = await tenant_seen({"authorization": "Basic eng"})
    assert tenant == ""
    assert call.header("authorization") == "Basic eng"


async def test_the_date_is_the_hosts_servers_alone() -> None:
    """Another server adds one to every response, whatever the engine's has."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        headers = [(b"date", b"Thu, 01 Jan 2026 00:00:00 GMT"), (b"x-engine", b"a")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    engine = FakeEngine("a", behave)
    async with Server(engine, drain_s=0.1) as server, host(Proxy({"endpoints": {"a": server.url}})) as client:
        answer = await client.post(f"/llm{CHAT}", json=BODY)
    assert "date" not in answer.headers
    assert answer.headers["x-engine"] == "a"


async def test_a_function_may_name_the_tenant() -> None:
    tenant, _ = await tenant_seen(
        {"x-team": "red", "authorization": "Bearer ann"},
        tenant=lambda scope: dict(scope["headers"])[b"x-team"].decode(),
    )
    assert tenant == "red"


async def test_the_proxys_own_keys_decide_where_there_are_any() -> None:
    config = {"filters": {"auth": {"keys": [{"name": "bob", "key": "k" * 20}]}}}
    tenant, _ = await tenant_seen({"authorization": f"Bearer {'k' * 20}"}, config)
    assert tenant == "bob"


@pytest.mark.parametrize(
    ("user", "name"),
    [("ann", "ann"), (None, ""), (type("User", (), {"username": "ann"})(), "ann"), (object(), "")],
    ids=["text", "none", "username", "nameless"],
)
async def test_users_of_other_frameworks(user: object, name: str) -> None:
    seen = []
    proxy = Proxy({"endpoints": NOWHERE})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["user"] = user
        await proxy(scope, receive, send)

    async with proxy, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        await client.post(CHAT, json=BODY)
        seen = [one.tenant for one in proxy.recent.latest()]
    assert seen == [name]


# at run time


async def test_an_endpoint_may_be_added_and_removed() -> None:
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with Server(engines[0], drain_s=0.1) as one, Server(engines[1], drain_s=0.1) as two:
        proxy = Proxy({"endpoints": {"a": one.url}})
        async with host(proxy) as client:
            proxy.add_endpoint("b", two.url, models=["m"])
            assert list(proxy.status()["clusters"]["default"]) == ["a", "b"]
            assert await proxy.remove_endpoint("a") == 0
            for _ in range(4):
                assert (await client.post(f"/llm{CHAT}", json=BODY)).json()["served_by"] == "b"
            await proxy.reload({"endpoints": {"a": one.url}, "retry": {"attempts": 1}})
            assert list(proxy.status()["clusters"]["default"]) == ["b"]


async def test_removing_waits_for_the_endpoints_requests_as_long_as_it_is_allowed_to() -> None:
    go_on = asyncio.Event()

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"1")
        await go_on.wait()
        await send({"type": "http.response.body", "body": b""})

    async with Server(FakeEngine("a", behave), drain_s=0.1) as one, Server(FakeEngine("b"), drain_s=0.1) as two:
        proxy = Proxy({"endpoints": {"a": one.url}})
        transport = kvproxy.AsyncTransport(proxy)
        async with proxy, httpx.AsyncClient(transport=transport) as client:
            async with client.stream("POST", f"http://engines{CHAT}", json=BODY) as answer:
                proxy.add_endpoint("b", two.url)
                assert await proxy.remove_endpoint("a", drain=0.01) == 1
                assert proxy.status()["requests"] == 1
                go_on.set()
                assert await answer.aread() == b"data: 1\n\n"
            proxy.add_endpoint("a", one.url)
            assert await proxy.remove_endpoint("a", drain=60) == 0


async def test_invalid_changes_of_endpoints_are_named() -> None:
    proxy = Proxy({"endpoints": NOWHERE})
    with pytest.raises(kvproxy.ConfigError, match="url"):
        proxy.add_endpoint("b", "nowhere")
    with pytest.raises(kvproxy.ConfigError, match=r"wieght.*weight"):
        proxy.add_endpoint("b", "http://b:1", wieght=2)
    with pytest.raises(LookupError, match="no cluster 'other'; there are: default"):
        proxy.add_endpoint("b", "http://b:1", cluster="other")
    with pytest.raises(LookupError, match="no endpoint 'z'"):
        await proxy.remove_endpoint("z")


async def test_a_reload_takes_plain_data_and_a_mistake_changes_nothing() -> None:
    async with Proxy({"endpoints": NOWHERE}) as proxy:
        await proxy.reload({"endpoints": {"b": "http://127.0.0.1:9"}})
        with pytest.raises(kvproxy.ConfigError, match="endpoints"):
            await proxy.reload({"endpoints": {"c": "nowhere"}})
        assert list(proxy.status()["clusters"]["default"]) == ["b"]


async def test_status_names_conditions_and_whether_it_runs() -> None:
    proxy = Proxy({"endpoints": NOWHERE, "health": {"active": False}})
    async with proxy:
        assert proxy.status()["running"]
        assert proxy.status()["clusters"]["default"]["a"]["condition"] == "up"
    assert not proxy.status()["running"]


# its operator's apps


async def test_admin_and_metrics_are_apps_to_mount() -> None:
    """The page finds its files below the path where it is mounted."""
    proxy = Proxy({"endpoints": NOWHERE})
    mounts = [Mount("/kvproxy", proxy.admin), Mount("/metrics", proxy.metrics_app)]
    async with host(proxy, *mounts) as client:
        assert "<html" in (await client.get("/kvproxy/")).text
        for path in ("page.css", "live", "endpoints", "metrics", "readyz"):
            assert (await client.get(f"/kvproxy/{path}")).status_code in (200, 503), path
        assert "kvproxy_requests" in (await client.get("/metrics/")).text


async def test_the_mounted_admin_app_keeps_its_access_control() -> None:
    proxy = Proxy({"endpoints": NOWHERE, "admin": {"token": "t" * 20}})
    async with host(proxy, Mount("/kvproxy", proxy.admin)) as client:
        assert (await client.get("/kvproxy/page.css")).status_code == 200
        assert (await client.get("/kvproxy/live")).status_code == 401
        headers = {"authorization": f"Bearer {'t' * 20}"}
        assert (await client.get("/kvproxy/live", headers=headers)).status_code == 200


async def test_the_metrics_app_leaves_other_protocols_alone() -> None:
    app: ASGIApp = Proxy({"endpoints": NOWHERE}).metrics_app
    await app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]


# event loops

TURN = {"model": "m", "messages": [{"role": "user", "content": "the same long beginning " * 200}]}


async def chat_in(proxy: Proxy) -> httpx.Response:
    """Send a chat to the mounted proxy, wherever it runs or does not."""
    app = Starlette(routes=[Mount("/llm", proxy)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        return await client.post(f"/llm{CHAT}", json=TURN)


def holders(proxy: Proxy) -> set[str]:
    """Endpoints that were known to hold some of the latest prompt."""
    facts = next(proxy.recent.latest()).facts
    assert facts is not None
    return {str(name) for name in facts.by_endpoint}


@pytest.fixture
def engine() -> Iterator[str]:
    """Yield the URL of an engine in another thread."""
    there = background()
    server = Server(FakeEngine("a"), drain_s=0.1)
    there.run(server.__aenter__())
    yield server.url
    there.run(server.__aexit__())


def test_started_again_in_another_event_loop_it_goes_on_with_what_it_learned(engine: str) -> None:
    """As test clients enter an app in one test after another. Its background work goes on as well, and ends."""
    proxy = Proxy({"endpoints": {"a": engine}})

    async def live() -> int:
        async with proxy:
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert "event loop lag" in names
            assert any(name.startswith("kvcache") for name in names), names
            status = (await chat_in(proxy)).status_code
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return status

    assert asyncio.run(live()) == 200
    assert not holders(proxy)
    for _ in range(3):
        assert asyncio.run(live()) == 200
        assert holders(proxy) == {"a"}


def test_an_event_loop_that_ends_without_it_takes_nothing_learned_away(engine: str) -> None:
    """As test clients that make a loop for each request do."""
    proxy = Proxy({"endpoints": {"a": engine}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the sockets that were not closed
        for _ in range(3):
            assert asyncio.run(chat_in(proxy)).status_code == 200
        assert holders(proxy) == {"a"}
        del proxy
        gc.collect()


async def test_a_late_request_does_not_start_it_again() -> None:
    proxy = Proxy({"endpoints": NOWHERE})
    async with proxy:
        pass
    assert (await chat_in(proxy)).status_code == 502
    assert not proxy.status()["running"]


async def test_a_start_that_failed_may_be_tried_again(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its endpoints, whatever part it was that failed."""
    proxy = Proxy({"endpoints": {"a": engine}})
    service = proxy.kvcache
    assert service is not None

    async def broken() -> None:
        raise OSError("no room")

    monkeypatch.setattr(type(service.scraper), "__aenter__", lambda _: broken())
    with pytest.raises(OSError, match="no room"):
        await proxy.__aenter__()
    monkeypatch.undo()
    async with proxy:
        assert (await chat_in(proxy)).status_code == 200


async def test_it_is_entered_once() -> None:
    async with Proxy({"endpoints": NOWHERE}) as proxy:
        with pytest.raises(RuntimeError, match="entered already"):
            await proxy.__aenter__()


async def test_one_that_a_request_started_may_be_entered_and_ends_then(engine: str) -> None:
    proxy = Proxy({"endpoints": {"a": engine}})
    assert (await chat_in(proxy)).status_code == 200
    async with proxy:
        assert (await chat_in(proxy)).status_code == 200
    assert not proxy.status()["running"]


async def test_a_request_that_starts_it_while_it_is_entered_waits(engine: str) -> None:
    proxy = Proxy({"endpoints": {"a": engine}})
    answer, _ = await asyncio.gather(chat_in(proxy), proxy.__aenter__())
    assert answer.status_code == 200
    await proxy.__aexit__()
    assert not proxy.status()["running"]


async def test_in_a_loop_beside_its_own_the_error_names_the_way_out(engine: str) -> None:
    async with Proxy({"endpoints": {"a": engine}}) as proxy:
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, chat_in(proxy))
        assert (await chat_in(proxy)).status_code == 200
