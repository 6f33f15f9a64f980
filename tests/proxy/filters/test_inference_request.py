"""Filter inference_request: one bounded read, one parse, and the same bytes for the filters behind it."""

from __future__ import annotations

import asyncio
import gzip
import socket
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import ASGIApp, Message

from kvproxy.base.json_scan import MAX_DECODED_BYTES
from kvproxy.base.types import RequestKind
from kvproxy.proxy.filter_settings import InferenceRequestSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH, build
from kvproxy.proxy.forward.body_guard import is_guarded
from kvproxy.proxy.request.body import BodyReader, BodyTooSlow, HeldBodies
from kvproxy.proxy.request.parse import MAX_PARTS
from kvproxy.proxy.settings import LimitSettings
from tests.support.asgi import Inner, call, http_scope
from tests.support.filter_context import counted, filter_context
from tests.support.loop_time import skipping_time
from tests.support.loopback import serve

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": [{"role": "user"}], "user": "u"}'


def filter_around(inner: ASGIApp, *, context: FilterContext | None = None) -> ASGIApp:
    return build(inner, InferenceRequestSettings(), context or filter_context())


def post(path: str = CHAT, **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return http_scope(path, method="POST", headers=pairs)


@pytest.mark.parametrize(("path", "kind"), KIND_OF_PATH.items())
async def test_every_known_path_is_parsed(path: str, kind: RequestKind) -> None:
    """The exchange has the raw body and its meaning; the inner app receives the same bytes."""
    inner = Inner()
    await call(filter_around(inner), post(path), body=BODY)
    assert inner.exchange.body == BODY
    assert inner.exchange.inference is not None
    assert (inner.exchange.inference.kind, inner.exchange.inference.model) == (kind, "m")
    assert inner.bodies == [BODY]


async def test_a_scan_hands_over_what_has_to_be_guarded() -> None:
    """Messages too, which may name media; so that a long body is not gone through twice."""
    inner = Inner()
    filling = "x" * MAX_DECODED_BYTES
    body = f'{{"model":"m","messages":["{filling}"],"remote_x":1,"y":2,"cache_salt":"s"}}'.encode()
    await call(filter_around(inner), post(CHAT), body=body)
    assert inner.exchange.members is not None
    guarded = [each.name for each in inner.exchange.members.found if is_guarded(each.name)]
    assert guarded == ["messages", "remote_x", "cache_salt"]


@pytest.mark.parametrize(
    "scope",
    [
        http_scope("/v1/audio/transcriptions", method="POST"),
        http_scope("/chat/completions", method="POST"),
        http_scope("/v1/messages/count_tokens", method="POST"),
        http_scope(CHAT, method="GET"),
    ],
    ids=lambda scope: f"{scope['method']} {scope['path']}",
)
async def test_everything_else_passes_unread(scope: dict[str, Any]) -> None:
    """Not a byte is read of what this filter does not know."""
    inner = Inner(reads=False)
    reads = 0

    async def receive() -> Message:
        nonlocal reads
        reads += 1
        return {"type": "http.request"}

    async def send(message: Message) -> None: ...

    await filter_around(inner)(scope, receive, send)
    assert (reads, len(inner.scopes)) == (0, 1)
    assert inner.scopes[0] == scope


async def test_other_scope_types_pass() -> None:
    """The lifespan is not this filter's."""
    inner = Inner()
    await call(filter_around(inner), {"type": "lifespan", "path": CHAT})
    assert inner.scopes == [{"type": "lifespan", "path": CHAT}]


async def test_a_body_in_pieces_is_joined_and_replayed_whole_then_the_client_is_heard_again() -> None:
    """After the body the inner app sees what really comes next: the disconnect."""
    heard: list[Message] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    pieces = [{"type": "http.request", "body": BODY[i : i + 7], "more_body": True} for i in range(0, len(BODY), 7)]
    await call(filter_around(inner), post(), *pieces, {"type": "http.request"})
    assert heard == [{"type": "http.request", "body": BODY, "more_body": False}, {"type": "http.disconnect"}]


@pytest.mark.parametrize("body", [b"{", b"[1]", b"", b'{"messages": [5}'])
async def test_an_unparsable_body_is_forwarded_as_it_is(body: bytes) -> None:
    """The engine's own error is what the client should see."""
    inner = Inner()
    reply = await call(filter_around(inner), post(), body=body)
    assert (reply.status, inner.bodies, inner.exchange.inference) == (200, [body], None)


@pytest.mark.parametrize(("encoding", "understood"), [("gzip", False), ("identity", True)])
async def test_compressed_bodies_go_on_unparsed(encoding: str, understood: bool) -> None:
    """Nothing is unpacked here: the bytes go up as they came."""
    inner = Inner()
    body = gzip.compress(BODY) if encoding == "gzip" else BODY
    await call(filter_around(inner), post(content_encoding=encoding), body=body)
    assert inner.bodies == [body]
    assert (inner.exchange.inference is not None) is understood


@pytest.mark.parametrize(
    ("settings", "headers", "key"),
    [
        ({}, {"x_session_id": " s1 "}, "s1"),
        ({"session_header": "X-Chat"}, {"x_chat": "c", "x_session_id": "s1"}, "c"),
        ({}, {}, "u"),
    ],
)
async def test_session_header(settings: dict[str, str], headers: dict[str, str], key: str) -> None:
    """The configured header names the session before the body does."""
    inner = Inner()
    app = build(inner, InferenceRequestSettings.model_validate(settings), filter_context())
    await call(app, post(**headers), body=BODY)
    assert inner.exchange.inference is not None
    assert inner.exchange.inference.session_key == key


@pytest.mark.parametrize(
    ("headers", "client", "session"),
    [
        ({"user_agent": "claude-cli/2.1.126 (external, cli)", "x_claude_code_session_id": "r"}, "claude-code", "named"),
        ({"x_claude_code_session_id": "r", "x_claude_code_agent_id": "a"}, "claude-code", "child"),
        ({"user_agent": "anything/1"}, "unknown", "none"),
    ],
)
async def test_clients_are_counted(headers: dict[str, str], client: str, session: str) -> None:
    """By what they are, and whether they name a session; of a long body too. What cannot be parsed is not counted."""
    context = filter_context()
    app = filter_around(Inner(), context=context)
    body = b'{"model": "m", "messages": ["%s"]}'
    for sent in (body % b"", body % (b"x" * MAX_DECODED_BYTES), b"["):
        await call(app, post(**headers), body=sent)
    assert counted(context, "kvproxy_client_requests_total", client=client, session=session) == 2


@pytest.mark.parametrize(("path", "field"), [(CHAT, "code"), ("/v1/messages", "type")])
async def test_a_declared_length_over_the_limit_is_refused_unread(path: str, field: str) -> None:
    """413 in the API's own shape; the inner app never runs."""
    inner, context = Inner(), filter_context(limits=LimitSettings(body=100))
    reply = await call(filter_around(inner, context=context), post(path, content_length="101"), body=b"x" * 101)
    assert (reply.status, inner.scopes, reply.headers[b"connection"]) == (413, [], b"close")
    assert reply.json["error"][field] == ("body_too_large" if field == "code" else "request_too_large")
    assert counted(context, "kvproxy_bodies_refused_total") == 1
    assert counted(context, "kvproxy_local_replies_total", status="413", reason="body_too_large") == 1


@pytest.mark.parametrize("headers", [{}, {"content_length": "junk"}, {"content_length": "9" * 5000}])
async def test_undeclared_lengths_are_counted(headers: dict[str, str]) -> None:
    """Reading stops at the limit, whatever was declared."""
    inner = Inner()
    chunk = {"type": "http.request", "body": b"x" * 40, "more_body": True}
    app = filter_around(inner, context=filter_context(limits=LimitSettings(body=100)))
    reply = await call(app, post(**headers), chunk, chunk, chunk, {"type": "http.disconnect"})
    assert (reply.status, inner.scopes) == (413, [])


async def test_a_body_of_exactly_the_limit_passes() -> None:
    """The limit itself is allowed."""
    inner = Inner()
    app = filter_around(inner, context=filter_context(limits=LimitSettings(body=len(BODY))))
    reply = await call(app, post(content_length=str(len(BODY))), body=BODY)
    assert (reply.status, inner.bodies) == (200, [BODY])


async def test_a_client_that_leaves_while_sending_is_not_forwarded() -> None:
    """Half a body goes nowhere, and the log will say why."""
    inner, scope = Inner(), post()
    reply = await call(filter_around(inner), scope, {"type": "http.request", "body": b"{", "more_body": True})
    assert (reply.messages, inner.scopes) == ([], [])
    assert (scope["kvproxy"].outcome.end, scope["kvproxy"].outcome.status) == ("client_disconnected", 499)


async def test_a_body_that_does_not_arrive_gets_408() -> None:
    """A client cannot hold a request open by sending nothing."""
    inner, context = Inner(), filter_context(limits=LimitSettings(body_timeout=0.01))
    async with serve(filter_around(inner, context=context)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert inner.scopes == []
    assert counted(context, "kvproxy_local_replies_total", status="408", reason="body_timeout") == 1


async def test_reads_time_out_one_by_one() -> None:
    """One timer serves all reads, and each read has its own full time."""
    reader = BodyReader(limit_bytes=10, timeout_s=40.0, held=HeldBodies(100))
    silence = asyncio.Event()

    async def receive() -> Message:
        await silence.wait()
        return {"type": "http.request", "body": b"late"}

    async def start() -> asyncio.Task[bytes]:
        task = asyncio.create_task(reader.read(receive))
        await asyncio.sleep(0)
        return task

    with skipping_time() as skip:
        first = await start()
        await skip(30.0)
        second, third = await start(), await start()
        await skip(30.0)
        with pytest.raises(BodyTooSlow):
            await first
        assert not second.done()
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        silence.set()
        assert await second == b"late"


async def test_a_read_that_timed_out_leaves_no_cancellation_behind() -> None:
    """Code that goes on after it can be cancelled again; and one that is cancelled besides is cancelled."""
    reader = BodyReader(limit_bytes=10, timeout_s=20.0, held=HeldBodies(100))
    never, told = asyncio.Event(), list[int]()

    async def receive() -> Message:
        await never.wait()
        return {"type": "http.disconnect"}

    async def read() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await reader.read(receive)
        except BodyTooSlow:
            told.append(task.cancelling())

    with skipping_time() as skip:
        slow, left = asyncio.create_task(read()), asyncio.create_task(read())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(20.0, left.cancel)
        await skip(30.0)
        await slow
        with pytest.raises(asyncio.CancelledError):
            await left
    assert told == [0]


async def test_a_hundred_megabytes_are_refused_at_once_over_a_socket() -> None:
    """The answer comes before the body does, nothing of which is held, and the connection ends."""
    inner, context = Inner(), filter_context(limits=LimitSettings(body=1000))
    async with serve(filter_around(inner, context=context)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x" * 65536)
        rest = await reader.read()
        assert context.services.bodies.held_bytes == 0
        writer.transport.abort()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head
    assert rest.endswith(b"}}")
    assert inner.scopes == []


async def test_all_bodies_together_are_bounded() -> None:
    """Beyond it 503 with retry-after; counted from each byte as it comes, and given back whatever the end."""
    context = filter_context(limits=LimitSettings(body=100, bodies=250))
    held = context.services.bodies
    go = asyncio.Event()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        if (await receive())["body"] == b"x" * 99:
            raise ZeroDivisionError

    app = filter_around(inner, context=context)

    def half(size: int) -> Message:
        return {"type": "http.request", "body": b"x" * size, "more_body": True}

    running = [asyncio.create_task(call(app, post(), body=b"x" * size)) for size in (99, 100)]
    await asyncio.sleep(0)
    assert held.held_bytes == counted(context, "kvproxy_bodies_held_bytes") == 199
    assert counted(context, "kvproxy_bodies_limit_bytes") == 250
    reply = await call(app, post(), half(40), half(40))
    assert (reply.status, reply.headers[b"retry-after"], reply.json["error"]["code"]) == (503, b"1", "bodies_full")
    assert held.held_bytes == 199
    assert counted(context, "kvproxy_bodies_full_total") == 1
    for messages in ([half(40)], [half(50), half(51)]):  # the client leaves; too large
        await call(app, post(), *messages)
        assert held.held_bytes == 199
    running[1].cancel()
    go.set()
    ends = await asyncio.gather(*running, return_exceptions=True)
    assert [type(end) for end in ends] == [ZeroDivisionError, asyncio.CancelledError]
    assert held.held_bytes == 0


async def test_a_body_that_is_given_up_is_given_back() -> None:
    """Cancelled in the middle, or too slow."""
    held = HeldBodies(100)
    reader = BodyReader(limit_bytes=100, timeout_s=0.02, held=held)
    silent = asyncio.Event()
    first = True

    async def receive() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": b"half", "more_body": True}
        silent.set()
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(BodyTooSlow):
        await reader.read(receive)
    assert held.held_bytes == 0
    first, silent = True, asyncio.Event()
    task = asyncio.create_task(reader.read(receive))
    await silent.wait()
    assert held.held_bytes == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.held_bytes == 0


async def test_httpx_sees_the_refusal_of_a_streamed_body() -> None:
    """A client in the middle of a chunked upload gets the answer, not a reset."""

    async def upload() -> Any:
        for _ in range(8):
            yield b"x" * 1000

    app = filter_around(Inner(), context=filter_context(limits=LimitSettings(body=1000)))
    async with serve(app) as url, httpx.AsyncClient() as client:
        reply = await client.post(f"{url}/v1/messages", content=upload())
    assert reply.status_code == 413
    assert msgspec.json.decode(reply.content)["error"]["type"] == "request_too_large"


async def test_no_continue_is_sent_to_a_client_that_asked_first() -> None:
    """A client that waits for `100 Continue` gets the refusal instead."""
    app = filter_around(Inner(), context=filter_context(limits=LimitSettings(body=10)))
    async with serve(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        rest = await reader.read()
        writer.close()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in rest


@pytest.mark.parametrize("sizes", [[0], [5], [0, 5], [5, 0, 0], [70_000, 1, 3, 70_000], [1] * 1000])
async def test_a_body_is_whole_however_it_comes(sizes: list[int]) -> None:
    """Also where its pieces are many, or empty."""
    sent = [bytes([65 + index % 26]) * size for index, size in enumerate(sizes)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in sent]
    inner = Inner()
    await call(filter_around(inner), post(), *messages, {"type": "http.request"})
    assert inner.bodies == [b"".join(sent)]


async def test_results_of_a_hostile_body_are_bounded() -> None:
    """Parts, bytes and names, as they go to all filters behind."""
    name = b"n" * 3_000_000
    body = b'{"model":"%b","cache_salt":"%b","messages":[%b1]}' % (name, name, b"1," * 1_000_000)
    inner = Inner()
    await call(filter_around(inner), post(), body=body)
    found = inner.exchange.inference
    assert found is not None
    assert len(found.model) == len(found.cache_salt or "") == 32
    assert len(found.prompt.parts) == MAX_PARTS + 1
    assert inner.bodies == [body]
