"""Bodies of requests to another app: read ahead for a moment, then only as the app itself reads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive

from kvproxy.base.types import RequestKind
from kvproxy.proxy.filters.inference_request import InferenceRequestFilter
from kvproxy.proxy.request.body import BodiesFull, BodyReader, BodyRefused, BodyTooSlow, ClientLeft, HeldBodies
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.session import Caller

log = logging.getLogger("kvproxy.kvcache")

#: Delay after which the app is called even if the body has not arrived: it may refuse the request, or time the upload
#: out.
READ_AHEAD_S = 0.25

#: Called with a body that is complete only while the app reads it.
OnLateBody = Callable[[Exchange, Downstream], Awaitable[None]]


class ReadAhead(InferenceRequestFilter):
    """Parses the body for the app behind it, which gets every message and decides about every body.

    A body that arrives within READ_AHEAD_S is there before the app is called. A slower one, and one that the client
    sends only when asked to (`Expect: 100-continue`), is parsed when the app has received its end; `on_late_body` is
    awaited then. A body that is encoded or over a limit passes unparsed.
    """

    on_late_body: OnLateBody

    def __init__(self, app: ASGIApp, *, held: HeldBodies, limit_bytes: int, **options: Any) -> None:
        reader = BodyReader(limit_bytes=limit_bytes, timeout_s=READ_AHEAD_S, held=held)
        super().__init__(app, reader=reader, **options)
        self._held = held

    def read_ahead(self, exchange: Exchange, downstream: Downstream, kind: RequestKind) -> Awaitable[None] | None:
        """Wait for a body that may be read."""
        headers = downstream.scope["headers"]
        length, encoded, caller = self._headers(headers)
        if encoded or length > self._reader.limit_bytes:
            return None
        for name, _ in headers:
            if name == b"expect":
                self._follow(exchange, downstream, kind, caller, ())
                return None
        return self._read(exchange, downstream, kind, caller)

    async def _read(self, exchange: Exchange, downstream: Downstream, kind: RequestKind | None, caller: Caller) -> None:
        seen: list[Message] = []
        try:
            body = await self._reader.read(downstream.receive, seen)
        except BodyTooSlow:
            self._follow(exchange, downstream, kind, caller, seen)
            return
        except (BodyRefused, ClientLeft):
            downstream.wrap_receive(lambda receive: _Following(receive, deque(seen)).receive)
            with contextlib.suppress(BodiesFull):
                for message in seen:
                    self._hold(exchange, message)
            return
        waits = self._parse(exchange, downstream, body, kind, caller)
        if waits is not None:
            await waits

    def _follow(
        self,
        exchange: Exchange,
        downstream: Downstream,
        kind: RequestKind | None,
        caller: Caller,
        seen: Iterable[Message],
    ) -> None:
        """Let the app receive the rest by itself, beginning with the messages `seen`, and parse the body at its end."""

        async def complete(body: bytes) -> None:
            waits = self._parse(exchange, downstream, body, kind, caller)
            downstream.replayed = None  # the app has read it already
            exchange.held_bytes -= len(body)  # counted as it arrived
            if waits is not None:
                await waits
            await self.on_late_body(exchange, downstream)

        collected = _Collected(self._reader.limit_bytes, functools.partial(self._hold, exchange), complete)
        downstream.wrap_receive(lambda receive: _Following(receive, deque(seen), collected).receive)

    def _hold(self, exchange: Exchange, message: Message) -> None:
        """Count what is kept of a message; raises BodiesFull."""
        size = len(message.get("body", b""))
        self._held.hold_bytes(size)
        exchange.held_bytes += size
        exchange.release = self._held.give_back


class _Collected(msgspec.Struct, eq=False):
    """One body in the making, up to `limit_bytes` and as long as `hold` does not raise."""

    _limit_bytes: int
    _hold: Callable[[Message], None]
    complete: Callable[[bytes], Awaitable[None]]
    _pieces: list[bytes] = []
    _size_bytes: int = 0

    def add(self, message: Message) -> bool:
        """Keep what a message has of the body; False if the body cannot be had whole."""
        body = message.get("body", b"")
        self._size_bytes += len(body)
        if message["type"] != "http.request" or self._size_bytes > self._limit_bytes:
            return False
        try:
            self._hold(message)
        except BodiesFull:
            return False
        self._pieces.append(body)
        return True

    def joined(self) -> bytes:
        """Return the body."""
        return b"".join(self._pieces)


class _Following(msgspec.Struct, eq=False):
    """The messages of one request, first those that were received already; a body is collected on the way."""

    _receive: Receive
    _seen: deque[Message]
    _body: _Collected | None = None

    async def receive(self) -> Message:
        """ASGI's receive, for the app."""
        message = self._seen.popleft() if self._seen else await self._receive()
        body = self._body
        if body is None:
            return message
        if not body.add(message):
            self._body = None
        elif not message.get("more_body", False):
            self._body = None
            await self._finish(message, body)
        return message

    async def _finish(self, last: Message, body: _Collected) -> None:
        try:
            await body.complete(body.joined())
        except asyncio.CancelledError:
            self._seen.append(last)  # the app may read it again
            raise
        except Exception:
            log.exception("[kvcache] no facts for this request")
