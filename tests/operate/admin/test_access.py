"""Which clients may use the admin listener, and which web pages may not."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from kvproxy.operate.admin.app import AccessControl
from kvproxy.proxy.listener.server import Server
from tests.operate.admin.support import admin_of, problems_of, proxy_of
from tests.support.asgi import http_scope

TOKEN = {"admin": {"token": "s3cret"}}


async def test_the_token_is_required_where_there_is_one() -> None:
    """Everything but health and the page's own files; no difference between a wrong token and none."""
    proxy = proxy_of(**TOKEN)
    async with Server(proxy.admin) as server, httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/healthz", "/readyz", "/", "/page.js", "/page.css"):
            assert (await client.get(path)).status_code == 200, path
        wrong = {"authorization": "Bearer wrong"}
        for path in ("/metrics", "/live", "/config", "/endpoints", "/nothing"):
            refused = [await client.get(path), await client.get(path, headers=wrong)]
            assert [answer.status_code for answer in refused] == [401, 401]
            assert refused[0].text == refused[1].text
        assert refused[0].headers["www-authenticate"] == "Bearer"
        assert "Bearer TOKEN" in problems_of(refused[0])["header authorization"][1]
        good = await client.get("/metrics", headers={"authorization": "Bearer s3cret"})
        assert good.status_code == 200


@pytest.mark.parametrize("order", [1, -1])
async def test_two_tokens_are_none(order: int) -> None:
    """Which of them a gateway in front has looked at would be a guess."""
    both = [("authorization", "Bearer wrong"), ("authorization", "Bearer s3cret")][::order]
    proxy = proxy_of(**TOKEN)
    async with Server(proxy.admin) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/metrics", headers=both)).status_code == 401
        assert (await client.get("/metrics", headers=[both[0], both[0]])).status_code == 401


@pytest.mark.parametrize("host", ["evil.example:8889", "kvproxy", "127.0.0.1.evil.example", "[::1", "a:b:c", ""])
async def test_a_name_that_is_not_ours_is_refused(host: str) -> None:
    """Without a token, a page whose name was made to resolve here must not read anything."""
    async with admin_of(proxy_of(), host=host) as client:
        answer = await client.get("/live")
        assert (answer.status_code, list(problems_of(answer))) == (403, ["header host"])
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8889", "localhost", "LOCALHOST:1", "[::1]:8889", "10.1.2.3:8889"])
async def test_addresses_are_nobody_elses(host: str) -> None:
    """Literal addresses and localhost cannot be rebound."""
    async with admin_of(proxy_of(), host=host) as client:
        assert (await client.get("/live")).status_code == 200


async def test_one_page_is_put_together_in_a_turn_of_the_loop() -> None:
    """However many ask at once, clients' requests go on between them; health waits for none of them."""
    turn = 0
    turns: dict[str, list[int]] = {"/live": [], "/healthz": []}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        turns[scope["path"]].append(turn)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def receive() -> Message:
        raise AssertionError("nothing is to be read")

    async def send(message: Message) -> None:
        raise AssertionError("nothing is to be refused")

    access = AccessControl(app, token=lambda: None)
    counting = asyncio.create_task(count_turns())
    scopes = [http_scope(path, headers=[(b"host", b"127.0.0.1")]) for path in turns for _ in range(9)]
    await asyncio.gather(*(access(scope, receive, send) for scope in scopes))
    counting.cancel()
    assert len(set(turns["/live"])) == 9
    assert len(set(turns["/healthz"])) == 1


async def test_a_client_that_leaves_in_its_upload_is_no_error() -> None:
    """Nothing raises, so nothing is logged as a fault of ours."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Reaches no app."""

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    await proxy_of().admin(http_scope("/pick", method="POST", headers=headers), receive, send)


async def test_any_name_with_the_token() -> None:
    """A client that knows it needs no further proof."""
    async with admin_of(proxy_of(**TOKEN), host="kvproxy.internal", authorization="Bearer s3cret") as client:
        assert (await client.get("/live")).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_changes_must_be_json(kind: str) -> None:
    """Content types that a form of a foreign page can send are refused."""
    proxy = proxy_of()
    async with admin_of(proxy, **{"content-type": kind}) as client:
        answer = await client.post("/endpoints/default/a/drain", content=b"{}")
    assert (answer.status_code, list(problems_of(answer))) == (415, ["header content-type"])
    assert not proxy.clusters["default"].endpoints[0].draining


async def test_a_form_without_fields_is_a_form() -> None:
    """A foreign page can send one, body or not."""
    proxy = proxy_of()
    async with admin_of(proxy, **{"content-type": "text/plain"}) as client:
        assert (await client.post("/endpoints/default/a/drain")).status_code == 415
    assert not proxy.clusters["default"].endpoints[0].draining


async def test_a_change_without_a_body_needs_no_content_type() -> None:
    """`curl -X POST .../drain` works; a browser's foreign page names its origin and is refused all the same."""
    proxy = proxy_of()
    async with admin_of(proxy) as client:
        assert (await client.post("/endpoints/default/a/drain", headers={"content-type": ""})).status_code == 200
        assert proxy.clusters["default"].endpoints[0].draining
        foreign = {"content-type": "", "origin": "http://evil.example"}
        assert (await client.post("/endpoints/default/a/undrain", headers=foreign)).status_code == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://evil/127.0.0.1:8889"])
async def test_changes_from_another_origin_are_refused(origin: str) -> None:
    """Even as JSON."""
    proxy = proxy_of()
    async with admin_of(proxy, origin=origin) as client:
        answer = await client.post("/endpoints/default/a/drain")
    assert (answer.status_code, list(problems_of(answer))) == (403, ["header origin"])
    assert not proxy.clusters["default"].endpoints[0].draining


async def test_the_own_page_may_change_things() -> None:
    """Its origin is this listener."""
    async with admin_of(proxy_of(), origin="http://127.0.0.1:8889") as client:
        assert (await client.post("/endpoints/default/a/drain")).status_code == 200


async def test_every_answer_is_marked_for_browsers() -> None:
    """The page runs its own files only, in no other page's frame; refusals are marked too. Nothing live is cached."""
    async with admin_of(proxy_of()) as client:
        for answer in (await client.get("/"), await client.get("/nothing"), await client.post("/log", content="x")):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/config")).headers["cache-control"] == "no-store"


async def test_the_page_needs_nothing_from_outside() -> None:
    """No other host is named anywhere in it, save the SVG namespace; no inline script or style."""
    async with admin_of(proxy_of()) as client:
        page, script, style = [(await client.get(path)).text for path in ("/", "/page.js", "/page.css")]
    assert "<script>" not in page
    assert "style=" not in page
    assert "onclick" not in page
    everything = (page + script + style).replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in everything
    assert "https://" not in everything
    assert "innerHTML" not in script


async def test_other_scopes_pass() -> None:
    """A server's lifespan reaches the app."""
    sent = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup" if not sent else "lifespan.shutdown"}

    async def send(message: object) -> None:
        sent.append(message)

    await proxy_of().admin({"type": "lifespan"}, receive, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]  # type: ignore[index]
