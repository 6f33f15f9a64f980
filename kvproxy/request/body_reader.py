"""Reads a request body whole, within a size and a time."""

from __future__ import annotations

import asyncio
from io import BytesIO

from starlette.types import Message, Receive

from kvproxy.request.body_bounds import BodyTooLarge, BodyTooSlow, HeldBodies
from kvproxy.request.shared_timer import SharedTimer


class ClientLeft(Exception):
    """The client closed the connection before its body was complete."""


class BodyReader:
    """Reads request bodies whole, each within the same size and time, and all of them within `held`."""

    def __init__(self, *, limit_bytes: int, timeout_s: float, held: HeldBodies) -> None:
        self.limit_bytes = limit_bytes
        self.timeout_s = timeout_s
        self._held = held
        self._reading: SharedTimer[asyncio.Task[object]] = SharedTimer(timeout_s, _cancel)

    async def read(self, receive: Receive) -> bytes:
        """The whole body, to be given back with `release`. Raises BodyRefused's kinds or ClientLeft."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            return await self._whole(receive)
        except asyncio.CancelledError:
            if not self._reading.remove(task) and task.uncancel() == 0:
                raise BodyTooSlow(self.timeout_s) from None
            raise
        finally:
            self._reading.remove(task)

    def release(self, body: bytes) -> None:
        """The request of this body is over."""
        self._held.give_back(len(body))

    async def _whole(self, receive: Receive) -> bytes:
        pieces = Pieces()
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                piece: bytes = message.get("body", b"")
                if size + len(piece) > self.limit_bytes:
                    raise BodyTooLarge(self.limit_bytes)
                self._held.take(len(piece))
                size += len(piece)
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces.joined()
        except BaseException:
            self._held.give_back(size)
            raise


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


def replay(body: bytes, receive: Receive) -> Receive:
    """A receive that hands out `body` once more, whole, and then whatever comes next (the disconnect)."""
    handed_out = False

    async def receive_again() -> Message:
        nonlocal handed_out
        if handed_out:
            return await receive()
        handed_out = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
