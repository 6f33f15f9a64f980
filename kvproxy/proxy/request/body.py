"""Request bodies: read whole, within a size, a time, and a bound on what all of them hold together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from typing import Generic, TypeVar

from starlette.types import Message, Receive

from kvproxy.base.metrics.groups import Metrics
from kvproxy.proxy.metrics import ClientBoundMetrics
from kvproxy.proxy.request.error_reply import LocalReply

K = TypeVar("K")

#: Scanning a longer body takes milliseconds, so other tasks run in between.
LONG_BYTES = 512 * 1024


class ClientLeft(Exception):
    """The client closed the connection before its body was complete."""


class BodyRefused(LocalReply):
    """The client's body is not taken, and what is left of it is not read."""


class BodyTooLarge(BodyRefused):
    """The body is longer than the limit; at most that much of it was held."""

    def __init__(self, limit_bytes: int) -> None:
        message = f"The request body is larger than {limit_bytes} bytes."
        super().__init__(413, "body_too_large", message, unread=True)


class BodyTooSlow(BodyRefused):
    """The body did not arrive in time."""

    def __init__(self, timeout_s: float) -> None:
        message = f"The request body did not arrive within {timeout_s:g} seconds."
        super().__init__(408, "body_timeout", message, unread=True)


class BodiesFull(BodyRefused):
    """The bodies of all requests together are at their bound."""

    def __init__(self) -> None:
        message = "Too much is being uploaded at once; try again later."
        super().__init__(503, "bodies_full", message, headers=[(b"retry-after", b"1")], unread=True)


class BodyUnchecked(BodyRefused):
    """Body that may hold fields forbidden to clients and cannot be checked; the text explains why."""

    def __init__(self, message: str, *, encoded: bool) -> None:
        super().__init__(415 if encoded else 400, "body_unchecked", message)


class HeldBodies:
    """Counts the bytes of all bodies held, from each byte's arrival until its request is over."""

    __slots__ = ("held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int, *, metrics: Metrics | None = None) -> None:
        self.held_bytes = 0
        self.limit_bytes = limit_bytes
        if metrics is not None:
            metrics.group(ClientBoundMetrics).bodies_held.set_function(lambda: self.held_bytes)
            metrics.group(ClientBoundMetrics).bodies_limit.set(limit_bytes)

    def hold_bytes(self, size_bytes: int) -> None:
        """Hold that much more; raises BodiesFull, and holds no more, when it would be too much."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise BodiesFull
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that are no longer held."""
        self.held_bytes -= size_bytes


class BodyReader:
    """Reads request bodies whole, each within the same size and time, and all of them within `held`."""

    def __init__(self, *, limit_bytes: int, timeout_s: float, held: HeldBodies) -> None:
        self.limit_bytes = limit_bytes
        self.timeout_s = timeout_s
        self._held = held
        #: Returns the bytes of this body after the request's end.
        self.release = held.give_back
        self._reading: SharedTimer[asyncio.Task[object]] = SharedTimer(timeout_s, _cancel)

    def check_length(self, declared_bytes: int) -> None:
        """Raise BodyTooLarge for a declared length that will not be read."""
        if declared_bytes > self.limit_bytes:
            raise BodyTooLarge(self.limit_bytes)

    def accept_body(self, body: bytes) -> None:
        """Count a whole body that is there already, until `release`. Raises BodyRefused's kinds."""
        size = len(body)
        if size > self.limit_bytes:
            raise BodyTooLarge(self.limit_bytes)
        self._held.hold_bytes(size)

    async def read(self, receive: Receive, seen: list[Message] | None = None) -> bytes:
        """Return the whole body, to be given back with `release`; messages are put into `seen`. Raises BodyRefused's
        kinds or ClientLeft."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        pieces: Pieces | None = None
        size = 0
        try:
            while True:
                message = await receive()
                if seen is not None:
                    seen.append(message)
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                piece: bytes = message.get("body", b"")
                if size + len(piece) > self.limit_bytes:
                    raise BodyTooLarge(self.limit_bytes)
                self._held.hold_bytes(len(piece))
                size += len(piece)
                more = message.get("more_body", False)
                if pieces is None and not more:
                    return piece
                pieces = pieces or Pieces()
                pieces.append(piece)
                if not more:
                    return pieces.joined()
        except BaseException as error:
            self._held.give_back(size)
            cancelled = isinstance(error, asyncio.CancelledError)
            if cancelled and not self._reading.remove(task) and task.uncancel() == 0:
                raise BodyTooSlow(self.timeout_s) from None
            raise
        finally:
            self._reading.remove(task)


def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()


class Pieces:
    """Put together as they come: joined at the end, 32 MiB would hold the event loop for 20 ms."""

    __slots__ = ("_first", "_more")

    def __init__(self) -> None:
        self._first = b""
        self._more: BytesIO | None = None

    def append(self, piece: bytes) -> None:
        if self._more is not None:
            self._more.write(piece)
        elif not self._first:
            self._first = piece
        else:
            self._more = BytesIO()
            self._more.write(self._first)
            self._more.write(piece)

    def joined(self) -> bytes:
        """Without another copy."""
        return self._first if self._more is None else self._more.getvalue()


class SharedTimer(Generic[K]):
    """Calls `on_due(key)` once `delay_s` have passed since `add(key)`, unless `remove(key)` came first.

    Since all wait equally long, the oldest is always the next one due. Holds what was added and not removed.
    """

    __slots__ = ("_due", "_on_due", "_timer", "delay_s")

    def __init__(self, delay_s: float, on_due: Callable[[K], None]) -> None:
        self.delay_s = delay_s
        self._on_due = on_due
        self._due: dict[K, float] = {}  # loop time, oldest first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: K) -> None:
        """Begin to wait. A key is added once at a time."""
        loop = asyncio.get_running_loop()
        self._due[key] = due = loop.time() + self.delay_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def remove(self, key: K) -> bool:
        """Wait no longer; whether it was still waited for."""
        return self._due.pop(key, None) is not None

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, due in list(self._due.items()):
            if due > now:
                self._timer = loop.call_at(due, self._look)
                return
            if self.remove(key):  # not removed by one that came due before it
                self._on_due(key)
