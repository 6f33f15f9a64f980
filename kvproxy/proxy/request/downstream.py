"""The client's side of one request: its body on the way in, its response on the way out.

Under our own listener both are plain calls (`kvproxy.base.types.ClientConnection`); under another server, or behind a
filter that wraps `receive` or `send` and has to see their messages, they are ASGI's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Message, Receive, Scope, Send

from kvproxy.base.types import CONNECTION, ClientConnection, Headers
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify

#: Looks at (and may change, in place) the head of a response before it goes out.
HeadHook = Callable[[Exchange, int, Headers], None]


class Downstream(msgspec.Struct, eq=False):
    """State of a request shared by the filters of one chain segment: `receive` and `send` are the ASGI callables for
    the app behind them. `hooks` see the response's head, in this order. Made by `begin`."""

    exchange: Exchange
    #: The filters may change it. A server or filter around them may read its own afterwards; our listener does not.
    scope: Scope
    _receive: Receive
    _send: Send
    hooks: Sequence[HeadHook]
    #: Takes writes at once; None: ASGI's messages.
    connection: ClientConnection | None
    #: Set on the outermost segment alone, so that observers see a response once.
    _follows: bool
    further_headers: Headers = []  # added to the response
    status: int = 0  # of the response, once its head was sent
    sent_bytes: int = 0  # of the response's body
    complete: bool = False  # its end was sent
    #: A body that was read and is passed to the app once more; the next of `receive` comes after it.
    replayed: bytes | None = None

    @classmethod
    def begin(
        cls, exchange: Exchange, scope: Scope, receive: Receive, send: Send, hooks: Sequence[HeadHook] = ()
    ) -> Downstream:
        """Return that of a segment that begins here."""
        connection: ClientConnection | None = scope.get(CONNECTION)
        wrapped = connection is None or (
            getattr(send, "__self__", None) is not connection or getattr(receive, "__self__", None) is not connection
        )
        follows = not exchange.followed
        exchange.followed = True
        if wrapped:
            return cls(exchange, dict(scope), receive, send, hooks, None, follows)
        return cls(exchange, scope, receive, send, hooks, connection, follows)

    @classmethod
    def of(cls, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> Downstream:
        """Return that of the filters before this app, unless something between them and the app wraps a part of it."""
        own = getattr(send, "__self__", None)
        whole = getattr(receive, "__self__", None) is own
        if whole and isinstance(own, Downstream) and scope is own.scope:
            return own
        return cls.begin(exchange, scope, receive, send)

    # the request

    def take_body(self) -> bytes | None:
        """Return the whole request body, once, if all of it is there; None: `receive` it."""
        body = self.replayed
        if body is not None:
            self.replayed = None
        elif self.connection is not None:
            body = self.connection.take_body()
            if body is not None and self._follows:
                self.exchange.received_bytes += len(body)
        return body

    def wrap_receive(self, wrap: Callable[[Receive], Receive]) -> None:
        """Put a receive of one's own between the client and the app behind."""
        self._receive = wrap(self._receive)

    async def receive(self) -> Message:
        """ASGI's receive, for the app behind."""
        body = self.replayed
        if body is not None:
            self.replayed = None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        if self._follows:
            self.exchange.received_bytes += len(message.get("body", b""))
        return message

    # the response

    async def start(self, status: int, headers: Headers, piece: bytes, *, more: bool) -> None:
        """Send the head and the first piece of the body, and take over the list of headers."""
        headers = self._head(status, headers)
        connection = self.connection
        if connection is not None:
            if not connection.writable:
                await connection.drain()
            connection.start(status, headers, piece, more=more)
            self.status = status
        else:
            headers = [pair for pair in headers if pair[0] != b"date"]  # every server adds its own
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            self.status = status
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self.sent_bytes += len(piece)
        self.complete = not more
        if piece and "body_piece" in self.exchange.hooks:
            self._tell(piece)

    def start_now(self, status: int, headers: Headers) -> None:
        """Send the head alone; only where `connection` is writable. As for `start`."""
        assert self.connection is not None
        self.connection.start(status, self._head(status, headers), more=True)
        self.status = status

    async def write(self, piece: bytes, *, more: bool) -> None:
        """Send the next piece of the body."""
        connection = self.connection
        if connection is not None:
            if not connection.writable:
                await connection.drain()
            connection.write(piece, more=more)
        else:
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        self.sent_bytes += len(piece)
        self.complete = not more
        if piece and "body_piece" in self.exchange.hooks:
            self._tell(piece)

    def write_now(self, piece: bytes) -> None:
        """Send a piece that is not the last one; only while `connection` is writable."""
        assert self.connection is not None
        self.connection.write(piece, more=True)
        self.sent_bytes += len(piece)
        self._tell(piece)

    async def send(self, message: Message) -> None:
        """ASGI's send, for the app behind."""
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = self._head(status, list(message.get("headers", ())))
            await self._send({**message, "headers": headers})
            self.status = status
        else:
            await self._send(message)
            if message["type"] == "http.response.body":
                piece = message.get("body", b"")
                self.sent_bytes += len(piece)
                self.complete = not message.get("more_body", False)
                if piece:
                    self._tell(piece)

    def end(self, crash: str) -> None:
        """End the request for the filters of this segment."""
        if self._follows:
            notify(RequestObserver.ended, self.exchange, self.status, crash)

    def _head(self, status: int, headers: Headers) -> Headers:
        for hook in self.hooks:
            hook(self.exchange, status, headers)
        headers += self.further_headers
        if self._follows and "response_started" in self.exchange.hooks:
            notify(RequestObserver.response_started, self.exchange, status, headers)
        return headers

    def _tell(self, piece: bytes) -> None:
        if self._follows and "body_piece" in self.exchange.hooks:
            notify(RequestObserver.body_piece, self.exchange, piece)
