"""The client's side of a request: plain calls where our listener is at the other end, ASGI's messages elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvproxy.base.types import CONNECTION
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver
from tests.support.asgi import http_scope


class Listener:
    """A client's connection as our listener gives it; remembers what is called."""

    def __init__(self, body: bytes | None = b"body") -> None:
        self.writable = True
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        self.calls: list[Any] = []
        self._body = body

    def take_body(self) -> bytes | None:
        body, self._body = self._body, None
        return body

    def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], first_piece: bytes = b"", *, more: bool
    ) -> None:
        self.calls.append((status, list(headers), first_piece, more))

    def write(self, piece: bytes, *, more: bool) -> None:
        self.calls.append((piece, more))

    async def drain(self) -> None:
        self.calls.append("drained")
        self.writable = True

    async def receive(self) -> Message:
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.calls.append(message)


def on(listener: Listener, *, receive: Receive | None = None, send: Send | None = None) -> tuple[Downstream, Scope]:
    """Return the client's side of a request there, maybe with something wrapped around it."""
    scope = http_scope(**{CONNECTION: listener})
    exchange = Exchange.of(scope, now=0.0)
    return Downstream.begin(exchange, scope, receive or listener.receive, send or listener.send), scope


async def test_our_listener_is_called_plainly() -> None:
    """Head and first piece together, no messages, no copy of the scope."""
    listener = Listener()
    downstream, scope = on(listener)
    assert downstream.scope is scope
    assert downstream.take_body() == b"body"
    assert downstream.exchange.received_bytes == 4
    await downstream.start(200, [(b"a", b"b")], b"one", more=True)
    downstream.write_now(b"two")
    await downstream.write(b"three", more=False)
    assert listener.calls == [(200, [(b"a", b"b")], b"one", True), (b"two", True), (b"three", False)]
    assert (downstream.status, downstream.sent_bytes, downstream.complete) == (200, 11, True)


async def test_a_client_that_takes_no_more_is_waited_for() -> None:
    """Nothing is written past what it takes."""
    listener = Listener()
    downstream, _ = on(listener)
    listener.writable = False
    await downstream.start(200, [], b"one", more=True)
    listener.writable = False
    await downstream.write(b"two", more=False)
    assert listener.calls == ["drained", (200, [], b"one", True), "drained", (b"two", False)]


@pytest.mark.parametrize("wrapped", ["receive", "send"])
async def test_behind_a_filter_that_wraps_either_side_there_are_messages(wrapped: str) -> None:
    """It has to see them; and the scope may be its own."""
    listener, seen = Listener(), []

    async def other_receive() -> Message:
        return {"type": "http.request", "body": b"its own"}

    async def other_send(message: Message) -> None:
        seen.append(message["type"])
        await listener.send(message)

    if wrapped == "receive":
        downstream, scope = on(listener, receive=other_receive)
    else:
        downstream, scope = on(listener, send=other_send)
    assert downstream.connection is None
    assert downstream.scope is not scope
    assert downstream.take_body() is None
    await downstream.start(200, [], b"one", more=True)
    await downstream.write(b"two", more=False)
    assert [call["type"] for call in listener.calls] == ["http.response.start"] + ["http.response.body"] * 2
    assert seen == ([] if wrapped == "receive" else [call["type"] for call in listener.calls])


async def test_a_body_that_was_read_is_handed_on_once() -> None:
    """By either way of asking; what comes after it is the client's."""
    for take in (True, False):
        downstream, _ = on(Listener(body=None))
        downstream.replayed = b"read before"
        if take:
            assert downstream.take_body() == b"read before"
        else:
            assert (await downstream.receive())["body"] == b"read before"
        assert downstream.take_body() is None
        assert (await downstream.receive())["type"] == "http.disconnect"
        assert downstream.exchange.received_bytes == 0


async def test_the_router_shares_the_steps_downstream_unless_something_is_in_between() -> None:
    """A filter that changed the scope, or wrapped a side, gets messages."""
    downstream, scope = on(Listener())
    exchange = downstream.exchange
    assert Downstream.of(exchange, scope, downstream.receive, downstream.send) is downstream
    assert Downstream.of(exchange, {**scope}, downstream.receive, downstream.send) is not downstream
    assert Downstream.of(exchange, scope, Listener().receive, downstream.send) is not downstream


async def test_messages_are_counted_like_calls() -> None:
    """An app behind the filters answers with messages of its own."""
    listener = Listener()
    downstream, _ = on(listener)
    downstream.further_headers.append((b"x-more", b"1"))
    await downstream.send({"type": "http.response.start", "status": 206, "headers": [(b"a", b"b")]})
    await downstream.send({"type": "http.response.body", "body": b"piece", "more_body": True})
    assert (downstream.status, downstream.sent_bytes, downstream.complete) == (206, 5, False)
    await downstream.send({"type": "http.response.body", "body": b""})
    assert downstream.complete
    assert listener.calls[0]["headers"] == [(b"a", b"b"), (b"x-more", b"1")]


async def test_observers_hear_of_pieces_written_at_once() -> None:
    """The shortest way is no way past them."""

    class Hears(RequestObserver):
        def body_piece(self, exchange: Exchange, piece: bytes) -> None:
            heard.append(piece)

    heard: list[bytes] = []
    downstream, _ = on(Listener())
    downstream.exchange.attach(Hears())
    await downstream.start(200, [], b"one", more=True)
    downstream.write_now(b"two")
    await downstream.write(b"", more=False)
    assert heard == [b"one", b"two"]
