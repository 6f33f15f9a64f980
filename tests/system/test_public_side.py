"""Exposure of the public listener: paths, headers, fields, and nothing of one tenant's cache to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.forward.body_guard import tenant_salt
from kvproxy.proxy.forward.request_body import START_BYTES
from kvproxy.proxy.listener.server import Server, serve
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

CHAT = "/v1/chat/completions"
CHAIN = ["inference_request", "kvcache", "router"]
KEYS = [
    {"name": "alice", "key": "sk-alice"},
    {"name": "bob", "key": "sk-bob"},
    {"name": "operator", "key": "sk-debug", "debug": True},
    {"name": "gateway", "key": "sk-trusted", "trusted": True},
]


def authorized(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


async def raw(proxy: RunningProxy, path: str, *, method: str = "GET") -> bytes:
    """Send a request whose path no client library has touched; returns the whole answer."""
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return answer


CLOSED = [
    "/sleep",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "/pause",
    "/shutdown",
    "/metrics",
]


@pytest.mark.parametrize("paths", [[], ["all"]])
async def test_a_websocket_is_refused_with_a_sentence(paths: list[str]) -> None:
    """vLLM's `/v1/realtime` is one. An engine that is sent the request without the offer cannot explain its refusal."""
    async with running_proxy({"a": "http://127.0.0.1:9"}, filters={"router": {"paths": paths}}) as proxy:
        offer = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        headers = {**offer, "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
        answer = await proxy.client.get("/v1/realtime", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_websocket")
    assert "connect to an engine" in answer.json()["error"]["message"]


async def test_control_paths_of_engines_are_closed_and_counted() -> None:
    """404 that names the path; nothing reaches the engine."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        for path in CLOSED:
            answer = await proxy.client.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "path_not_public")
            assert answer.json()["error"]["message"] == f"Not found: `{path}`."
        counted = proxy.metric("kvproxy_local_replies_total", status="404", reason="path_not_public")
        ended = proxy.metric("kvproxy_request_ends_total", end="local_reply")
    assert (counted, ended) == (len(CLOSED), len(CLOSED))
    assert not engine.calls


async def test_a_route_for_all_of_v1_opens_no_control_path() -> None:
    """Routes say where to, not which client may; one for a path of its own does open it."""
    engine = FakeEngine("a")
    routes = [{"prefix": "/v1"}, {"prefix": "/tts"}]
    async with serve(engine) as url, running_proxy({"a": url}, routes=routes) as proxy:
        assert (await proxy.client.post("/v1/load_lora_adapter", json={})).status_code == 404
        assert (await proxy.client.post("/tts/speak", json={})).status_code == 200
        assert (await proxy.client.post(CHAT, json=chat())).status_code == 200
    assert [call.path for call in engine.calls] == ["/tts/speak", CHAT]


async def test_router_paths_opens_further_ones() -> None:
    """Listed paths, or all of them."""
    engine = FakeEngine("a", version="0.32.0")
    listed = [*CHAIN[:2], {"router": {"paths": ["/version", "/lora/"]}}]
    async with serve(engine) as url:
        async with running_proxy({"a": url}, filters=listed) as proxy:
            answers = [(await proxy.client.get(path)).status_code for path in ("/version", "/lora/x", "/lora", "/x")]
        async with running_proxy({"a": url}, filters=[{"router": {"paths": "all"}}]) as proxy:
            assert (await proxy.client.get("/")).json()["served_by"] == "a"
            assert (await proxy.client.post("/sleep")).json()["served_by"] == "a"
    assert answers == [200, 200, 404, 404]


@pytest.mark.parametrize(
    "path",
    ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/.%2E/sleep", "/v1%2f..%2fsleep", "/v1/models/../../sleep", "/v1/./models",
     "/v1/%2e%2e%5csleep"],
)  # fmt: skip
@pytest.mark.parametrize("paths", [[], "all"])
async def test_dot_segments_are_refused(path: str, paths: Any) -> None:
    """Encoded ones too: the next server on the way might resolve them."""
    engine = FakeEngine("a")
    routes = [{"prefix": "/v1"}]
    filters = [{"router": {"paths": paths}}]
    async with serve(engine) as url, running_proxy({"a": url}, routes=routes, filters=filters) as proxy:
        answer = await raw(proxy, path)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"dot_segment" in answer
    assert not engine.calls


async def test_the_proxy_says_what_it_is_and_how_it_is() -> None:
    """`GET /` is one line; the health path answers for the proxy, without a key, whatever one engine says."""
    engine = FakeEngine("a")
    filters = [{"auth": {"keys": KEYS}}, *CHAIN]
    async with serve(engine) as url, running_proxy({"a": url}, filters=filters) as proxy:
        engine.healthy = False  # its own /health is 503: not asked
        greeting = await proxy.client.get("/", headers=authorized("sk-alice"))
        up = await proxy.client.get("/health")
        posted = await proxy.client.post("/health")
        assert proxy.proxy.clusters["default"].operator.drain_endpoint(proxy.proxy.clusters["default"].endpoints[0].id)
        down = await proxy.client.get("/health")
    assert (greeting.status_code, greeting.text) == (200, "clients use /v1\n")
    assert (up.status_code, up.text) == (200, "ok\n")
    assert (down.status_code, down.text) == (503, "no endpoint in default\n")
    assert posted.status_code == 401
    assert not engine.calls


async def test_the_health_path_answers_get_and_head_alone() -> None:
    """Another method gets 405 with the ones that are allowed."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        for method in ("POST", "OPTIONS"):
            answer = await proxy.client.request(method, "/health")
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_a_redirect_of_a_trailing_slash_is_the_clients_to_follow() -> None:
    """As straight to an engine: 307 to the path without it, on the host that the client knows."""

    async def redirect(engine: FakeEngine, call: Call, send: Send) -> None:
        location = b"http://" + dict(call.headers)[b"host"] + call.path.rstrip("/").encode()
        await send({"type": "http.response.start", "status": 307, "headers": [(b"location", location)]})
        await send({"type": "http.response.body"})

    async with serve(FakeEngine("a", redirect)) as url, running_proxy({"a": url}) as proxy:
        answer = await proxy.client.post("/v1/chat/completions/", json={})
        assert (answer.status_code, answer.headers["location"]) == (307, "/v1/chat/completions")


async def test_the_health_path_can_be_named_or_left_out() -> None:
    """Left out, it is a path like any other."""
    engine = FakeEngine("a")
    async with serve(engine) as url:
        async with running_proxy({"a": url}, filters=[{"router": {"health_path": "/alive"}}]) as proxy:
            named = [(await proxy.client.get(path)).status_code for path in ("/alive", "/health")]
        async with running_proxy({"a": url}, filters=[{"router": {"health_path": ""}}]) as proxy:
            assert (await proxy.client.get("/health")).status_code == 404
    assert named == [200, 404]


async def test_a_request_does_not_loop_through_two_proxies() -> None:
    """A -> B -> A ends with 508 at A, after one round; the list of models as well."""
    a_config, b_config = (
        {
            "health": {"active": False},
            "retry": {"attempts": 1},
            "shield": "off",
            "filters": {"kvcache": {"kv_events": False}},
        }
        for _ in "ab"
    )
    async with TwoInARing(a_config, b_config) as (client, seen):
        answer = await client.post(CHAT, json=chat())
        chats = len(seen)
        models = await client.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (508, "loop")
    assert chats == 1, "the request came back once"
    assert models.status_code == 503
    assert len(seen) <= 3


class TwoInARing:
    """Two proxies, each the other's engine: B is reached through a counting app in front of it."""

    def __init__(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        self._a, self._b = a, b

    async def __aenter__(self) -> tuple[httpx.AsyncClient, list[str]]:
        self._stack = contextlib.AsyncExitStack()
        enter = self._stack.enter_async_context
        seen: list[str] = []
        holder: list[Proxy] = []

        async def front(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                seen.append(scope["path"])
                await holder[0](scope, receive, send)

        front_url = await enter(serve(front))
        a = await enter(Proxy(load_config({**self._a, "endpoints": {"b": front_url}})))
        a_server = await enter(Server(a, drain_s=1.0))
        holder.append(await enter(Proxy(load_config({**self._b, "endpoints": {"a": a_server.url}}))))
        client = await enter(httpx.AsyncClient(base_url=a_server.url, timeout=60))
        return client, seen

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()


async def test_via_tells_the_hops_in_order() -> None:
    """RFC 9110, 7.6.3; a name of its own in every proxy."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        await proxy.client.post(CHAT, json=chat(), headers={"via": "1.1 front"})
        await proxy.client.post(CHAT, json=chat())
    before, own = (call.header("via") or "" for call in engine.calls)
    assert before == f"1.1 front, {own}"
    assert own.startswith("1.1 kvproxy-")


CONTROL: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True},
    "bootstrap_room": 7,
    "remote_host": "10.0.0.9",
}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/v1/score", "/v1/chat/completions/batch"])
async def test_control_fields_never_come_from_an_untrusted_client(path: str) -> None:
    """On paths whose bodies are not parsed, too; the length follows, and every other byte stays."""
    engine = FakeEngine("a")
    rest = b'{"model": "m", "text":"x",  "n":1.0, "messages":[]'
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        body = rest + b"," + json.dumps(CONTROL).encode()[1:]
        answer = await proxy.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert engine.calls[0].body == rest + b"}"
    assert engine.calls[0].header("content-length") == str(len(rest) + 1)


async def test_a_body_sent_in_chunks_is_looked_at_too() -> None:
    """Neither its framing nor its type hides it."""

    async def pieces() -> Any:
        yield b'{"text":"x","remote_'
        yield b'host":"10.0.0.9"}'

    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        await proxy.client.post("/generate", content=pieces(), headers={"content-type": "text/plain"})
    assert engine.calls[0].body == b'{"text":"x"}'


@pytest.mark.parametrize("kinds", [["multipart/form-data; boundary=x"], ["application/json", "multipart/form-data"]])
@pytest.mark.parametrize("start", [b"{", b"\xef\xbb\xbf{", b" " * START_BYTES + b"{"], ids=["plain", "mark", "spaces"])
@pytest.mark.parametrize("padding", [0, 2 * START_BYTES], ids=["short", "long"])
async def test_a_body_that_only_claims_to_be_a_form_is_looked_at(kinds: list[str], start: bytes, padding: int) -> None:
    """Engines take the first of two types, or read JSON whatever the type says; a form begins with its boundary."""
    engine = FakeEngine("a")
    text = start + b'"text":"' + b"x" * padding + b'"'
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        headers = [("content-type", kind) for kind in kinds]
        await proxy.client.post("/generate", content=text + b',"bootstrap_room":7}', headers=headers)
    assert engine.calls[0].body == text + b"}"


async def test_a_trusted_key_keeps_them() -> None:
    """A scheduler in front of this proxy speaks for the engines."""
    engine = FakeEngine("a")
    headers = {"x-data-parallel-rank": "1", "x-prefiller-host-port": "10.0.0.9:1", "x-kvproxy-x": "y"}
    filters = [{"auth": {"keys": KEYS}}, *CHAIN]
    async with serve(engine) as url, running_proxy({"a": url}, filters=filters) as proxy:
        for key in ("sk-trusted", "sk-alice"):
            await proxy.client.post(CHAT, json=chat(**CONTROL), headers=authorized(key, **headers))
    trusted, other = engine.calls
    assert json.loads(trusted.body) == chat(**CONTROL)
    assert [trusted.header(name) for name in headers] == list(headers.values())
    assert json.loads(other.body) == chat()
    assert [other.header(name) for name in headers] == [None, None, None]


async def test_a_body_that_cannot_be_checked_is_refused() -> None:
    """400, or 415 for one in a content coding; the engine hears nothing."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        utf16 = await proxy.client.post(CHAT, content=json.dumps(CONTROL).encode("utf-16"))
        packed = await proxy.client.post(CHAT, content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
    assert (utf16.status_code, utf16.json()["error"]["code"]) == (400, "body_unchecked")
    assert (packed.status_code, packed.json()["error"]["code"]) == (415, "body_unchecked")
    assert not engine.calls


async def test_bodies_that_are_read_to_be_checked_have_their_limits() -> None:
    """The same as those of inference: 413 beyond `limits.body`, and no engine is held meanwhile."""
    engine = FakeEngine("a")
    limits = {"body": 100, "body_timeout": "1s"}
    async with serve(engine) as url, running_proxy({"a": url}, limits=limits) as proxy:
        large = await proxy.client.post("/v1/rerank", content=b"x" * 1000)
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/rerank HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
        slow = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
    assert large.status_code == 413
    assert slow.startswith(b"HTTP/1.1 408 ")
    assert not engine.calls


async def test_a_client_that_leaves_in_its_upload_is_no_error() -> None:
    """499 in the metrics, nothing sent."""
    engine = FakeEngine("a")
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/rerank HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
        await writer.drain()
        writer.close()
        await until(lambda: proxy.metric("kvproxy_request_ends_total", end="client_disconnected") == 1)
    assert not engine.calls


async def test_only_a_key_marked_for_it_sees_what_is_cached() -> None:
    """The decision tells whether another tenant's prompt is held; without `auth` there is no other."""
    engine = FakeEngine("a")
    debug = {"x-kvproxy-debug": "1"}
    filters = [{"auth": {"keys": KEYS}}, *CHAIN]
    async with serve(engine) as url:
        async with running_proxy({"a": url}, filters=filters) as proxy:
            shown = [
                "x-kvproxy-decision"
                in (await proxy.client.post(CHAT, json=chat(), headers=authorized(k, **debug))).headers
                for k in ("sk-alice", "sk-trusted", "sk-debug")
            ]
        async with running_proxy({"a": url}) as proxy:
            assert "x-kvproxy-decision" in (await proxy.client.post(CHAT, json=chat(), headers=debug)).headers
    assert shown == [False, False, True]


async def test_isolated_tenants_share_no_cached_prefix() -> None:
    """Their salt goes up with the body, and what one sent is no match for another."""
    engine = FakeEngine("a")
    keys = [{**key, "debug": True} for key in KEYS]
    filters = [{"auth": {"keys": keys, "isolate_tenants": True}}, *CHAIN]
    prompt = chat("x" * 4000)
    debug = {"x-kvproxy-debug": "1"}
    matched: dict[str, str] = {}
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware", filters=filters) as proxy:
        for key in ("sk-alice", "sk-bob", "sk-alice"):
            answer = await proxy.client.post(CHAT, json=prompt, headers=authorized(key, **debug))
            matched[key] = answer.headers["x-kvproxy-decision"]
        await proxy.client.post(CHAT, json={**prompt, "cache_salt": "own"}, headers=authorized("sk-bob"))
        await proxy.client.post("/v1/score", json={"text_1": "x"}, headers=authorized("sk-bob"))
    assert "matched=none" in matched["sk-bob"]
    assert "matched=a:" in matched["sk-alice"]
    salts = [json.loads(call.body).pop("cache_salt") for call in engine.calls]
    expected = [("alice", None), ("bob", None), ("alice", None), ("bob", "own"), ("bob", None)]
    assert salts == [tenant_salt(name, own) for name, own in expected]


async def redirects(engine: FakeEngine, call: Call, send: Send) -> None:
    headers = [
        (b"location", call.path.rpartition("/")[2].encode() and (call.header("x-to") or "").encode()),
        (b"server", b"uvicorn"),
        (b"x-kvproxy-endpoint", b"forged"),
        (b"x-kvproxy-decision", b"forged"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 307, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def test_engines_do_not_tell_clients_their_addresses() -> None:
    """FastAPI's redirect names the host it was asked by; its software is no client's business either."""
    engine = FakeEngine("a", redirects)
    async with serve(engine) as url, running_proxy({"a": url}) as proxy:
        locations = {
            f"{url}/v1/rerank/?a=1": "/v1/rerank/?a=1",
            "http://10.9.8.7:8000/v1/x": "/v1/x",
            "/v1/relative": "/v1/relative",
            "https://example.com/elsewhere": "https://example.com/elsewhere",
        }
        for to, expected in locations.items():
            answer = await proxy.client.post("/v1/rerank", json={}, headers={"x-to": to})
            assert answer.headers["location"] == expected
        assert "server" not in answer.headers
        assert answer.headers.get_list("x-kvproxy-endpoint") == ["a"]
        assert "x-kvproxy-decision" not in answer.headers


async def test_a_key_of_bytes_that_are_no_text_gets_the_engines_answer() -> None:
    """An alias in the routes must not turn a bad body into an error of the proxy."""
    engine = FakeEngine("a")
    routes = [{"model": "m", "upstream_model": "M"}, {"model": "*"}]
    async with serve(engine) as url, running_proxy({"a": url}, routes=routes) as proxy:
        answer = await proxy.client.post(CHAT, content=b'{"\xff":1,"model":"m","messages":[]}')
    assert answer.status_code == 200


async def test_one_engines_deep_list_of_models_is_left_out() -> None:
    """The others' models are told."""

    async def deep(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, b'{"data":[{"id":"x","deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}")

    async def sane(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, b'{"data":[{"id":"m"}]}')

    engines = FakeEngine("a", deep), FakeEngine("b", sane)
    async with serve(engines[0]) as a, serve(engines[1]) as b, running_proxy({"a": a, "b": b}) as proxy:
        answer = await proxy.client.get("/v1/models")
    assert [row["id"] for row in answer.json()["data"]] == ["m"]
