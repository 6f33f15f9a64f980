"""Figures read from the end of an answer on its way down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from kvproxy.base.errors import UpstreamDisconnected, UpstreamError
from kvproxy.base.types import CONNECTION, Headers
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.proxy.forward.relay import Relay
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from tests.support.asgi import http_scope
from tests.support.until import until

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":500}}\n\n'
DONE = b"data: [DONE]\n\n"


class Arriving:
    """The pieces of one answer, each of which the relay takes before the next comes."""

    def __init__(self, *pieces: bytes) -> None:
        self.response = UpstreamResponse(self, asyncio.get_running_loop())
        self.response.status = 200
        self._pieces = list(pieces)

    def take(self) -> bytes:
        """Return the next one."""
        if self._pieces:
            return self._pieces.pop(0)
        self.response.finish(b"")
        return b""

    def cancel(self) -> None:
        """Nothing is left to come."""


class Breaking(Arriving):
    """The same of an engine that closes its connection too early."""

    def take(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        raise UpstreamDisconnected("closed in the body")


async def nothing() -> Message:
    """Fail: this client sends nothing more."""
    raise AssertionError


async def ignore(message: Message) -> None:
    """Take every message."""


@pytest.mark.parametrize(
    "end",
    [(USAGE + DONE,), (USAGE, DONE), (USAGE[:30], USAGE[30:], DONE), (USAGE[:50], USAGE[50:], DONE[:5], DONE[5:])],
)
async def test_usage_is_found_however_the_last_events_are_cut(end: tuple[bytes, ...]) -> None:
    """Packets end where they like, in the middle of a name too."""
    exchange = Exchange(received_at=0.0)
    first, *rest = [b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'] * 20
    headers = [(b"content-type", b"text/event-stream")]
    downstream = Downstream.begin(exchange, http_scope(), nothing, ignore)
    relay = Relay(exchange, Arriving(*rest, *end).response, downstream, True)
    assert await relay.run(headers, first) is None
    assert (exchange.outcome.prompt_tokens, exchange.outcome.completion_tokens) == (1000, 500)


class Flowing:
    """A stream whose pieces come while the relay waits."""

    def __init__(self) -> None:
        self.response = UpstreamResponse(self, asyncio.get_running_loop())
        self.response.status = 200
        self.waiting: list[bytes] = []
        self.cancelled = False

    def take(self) -> bytes | None:
        return self.waiting.pop(0) if self.waiting else None

    def cancel(self) -> None:
        self.cancelled = True
        self.response.fail(UpstreamDisconnected("given up"), rest=b"")

    def comes(self, piece: bytes) -> None:
        """Deliver a piece."""
        response = self.response
        waits = response.waiter is not None and not response.waiter.done()
        if not waits or response.on_piece is None or not response.on_piece(b"".join([*self.waiting, piece])):
            self.waiting.append(piece)
            response.wake()

    def ends(self) -> None:
        """Complete the stream."""
        self.response.finish(b"")


class Client:
    """Takes pieces, until it is told not to."""

    def __init__(self) -> None:
        self.writable = True
        self.pieces: list[bytes] = []
        self.error: Exception | None = None
        self.drained = asyncio.Event()

    def start(self, status: int, headers: Headers, first_piece: bytes = b"", *, more: bool) -> None:
        self.pieces.append(first_piece)

    def write(self, piece: bytes, *, more: bool) -> None:
        if self.error is not None:
            raise self.error
        self.pieces.append(piece)

    async def drain(self) -> None:
        await self.drained.wait()
        self.writable = True

    async def send(self, message: Message) -> None:
        raise AssertionError(message)

    async def receive(self) -> Message:
        raise AssertionError


@pytest.fixture
async def flow() -> AsyncIterator[tuple[Flowing, Client, asyncio.Task[UpstreamError | None], Exchange]]:
    """Yield a stream of which the first piece has gone down."""
    engine, client = Flowing(), Client()
    scope = http_scope(**{CONNECTION: client})
    exchange = Exchange.of(scope, now=0.0)
    downstream = Downstream.begin(exchange, scope, client.receive, client.send)
    relay = Relay(exchange, engine.response, downstream, True)
    task = asyncio.create_task(relay.run([(b"content-type", b"text/event-stream")], b"first"))
    await asyncio.sleep(0)
    assert client.pieces == [b"first"]
    yield engine, client, task, exchange
    task.cancel()


Flow = tuple[Flowing, Client, "asyncio.Task[UpstreamError | None]", Exchange]


async def test_a_piece_goes_on_in_the_call_that_brings_it(flow: Flow) -> None:
    """The request's task sleeps until the end."""
    engine, client, task, exchange = flow
    engine.comes(b"second")
    assert client.pieces == [b"first", b"second"]
    engine.ends()
    assert await task is None
    assert client.pieces == [b"first", b"second", b""]
    assert exchange.outcome.end == "completed"
    assert engine.response.on_piece is None


async def test_usage_is_found_in_pieces_that_went_on_at_once(flow: Flow) -> None:
    """Though the request's task never saw them."""
    engine, _, task, exchange = flow
    engine.comes(USAGE)
    engine.comes(DONE)
    engine.ends()
    assert await task is None
    assert (exchange.outcome.prompt_tokens, exchange.outcome.completion_tokens) == (1000, 500)


async def test_a_client_that_takes_no_more_holds_the_engine_back(flow: Flow) -> None:
    """Later data is left where it is until the client takes more; nothing is lost or reordered."""
    engine, client, task, _ = flow
    client.writable = False
    engine.comes(b"second")
    await asyncio.sleep(0)
    engine.comes(b"third")
    assert (client.pieces, engine.waiting) == ([b"first"], [b"third"])
    client.drained.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert client.pieces == [b"first", b"second", b"third"]
    engine.ends()
    assert await task is None


async def test_a_piece_that_cannot_be_written_ends_the_request_as_if_its_task_had_written_it(flow: Flow) -> None:
    """The engine's response is given up, and the error is the listener's, not the engine's."""
    engine, client, task, _ = flow
    client.error = RuntimeError("longer than its content-length")
    engine.comes(b"second")
    with pytest.raises(RuntimeError, match="longer"):
        await task
    assert engine.cancelled


async def test_an_engine_that_dies_behind_passed_pieces_is_told_to_the_client(flow: Flow) -> None:
    """By an error event, after everything that came."""
    engine, client, task, exchange = flow
    engine.comes(b"data: x\n\n")
    engine.response.fail(UpstreamDisconnected("gone"), rest=b"")
    assert isinstance(await task, UpstreamDisconnected)
    assert client.pieces[:2] == [b"first", b"data: x\n\n"]
    assert b'"error"' in client.pieces[2]
    assert exchange.outcome.end == "upstream_died"


@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'])
async def test_a_break_behind_the_last_event_takes_nothing_away(flow: Flow, last: bytes) -> None:
    """The client has the whole answer, and no error in it."""
    engine, client, task, exchange = flow
    engine.comes(b"\n\n" + last)
    engine.response.fail(UpstreamDisconnected("gone"), rest=b"")
    assert await task is None
    assert b"".join(client.pieces) == b"first\n\n" + last
    assert exchange.outcome.end == "completed"


@pytest.mark.parametrize("length", [(), ((b"content-length", b"1000"),)])
async def test_a_broken_stream_says_so_unless_its_length_was_stated(length: tuple[tuple[bytes, bytes], ...]) -> None:
    """Within a stated length an event of ours would pass for the engine's; there the missing rest says it."""
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    exchange, flowing = Exchange(received_at=0.0), Flowing()
    downstream = Downstream.begin(exchange, http_scope(), nothing, keep)
    relay = Relay(exchange, flowing.response, downstream, True)
    running = asyncio.create_task(relay.run([(b"content-type", b"text/event-stream"), *length], b"data: 1\n\n"))
    await until(lambda: bool(sent))
    flowing.response.fail(UpstreamDisconnected("it is gone"), rest=b"")
    assert isinstance(await running, UpstreamDisconnected)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert bodies[0] == b"data: 1\n\n"
    assert [b'"error"' in body for body in bodies[1:]] == ([] if length else [True])


async def test_comments_are_no_first_event() -> None:
    """`: keep-alive` goes to the client at once, and the prefill is over with the first event alone."""
    sent: list[bytes] = []
    began_after: list[int] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    exchange = Exchange(received_at=0.0)
    comment, event = b": keep-alive\n\n", b'data: {"choices":[]}\n\n'
    headers = [(b"content-type", b"text/event-stream")]
    downstream = Downstream.begin(exchange, http_scope(), nothing, send)
    relay = Relay(exchange, Arriving(comment, comment, event, DONE).response, downstream, True)
    relay.on_event = lambda: began_after.append(sent.count(comment))
    assert await relay.run(headers, comment) is None
    assert began_after == [3]
    assert b"".join(sent) == comment * 3 + event + DONE


@pytest.mark.parametrize(
    ("tail", "told"), [(b"data: {}\n\n", True), (b"data: {}\r\n\r\n", True), (b'data: {"a', False)]
)
async def test_a_stream_that_breaks_inside_an_event_is_cut(tail: bytes, told: bool) -> None:
    """Clients drop an unfinished event; completed by an error they would try to read it."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    exchange = Exchange(received_at=0.0)
    downstream = Downstream.begin(exchange, http_scope(), nothing, send)
    relay = Relay(exchange, Breaking(b"data: {}\n\n", tail).response, downstream, True)
    error = await relay.run([(b"content-type", b"text/event-stream")], b"data: {}\n\n")
    assert isinstance(error, UpstreamDisconnected)
    assert (sent[-1]["more_body"] is False) is told
    assert (b"upstream_disconnected" in sent[-1]["body"]) is told
