"""Reads a request body whole, within a size and a time."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from kvproxy.filters.shared_timer import SharedTimer


class BodyTooLarge(Exception):
    """The body is longer than the limit; at most that much of it was held."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


class ClientLeft(Exception):
    """The client closed the connection before its body was complete."""


class BodyReader:
    """Reads request bodies whole, each within the same size and time."""

    def __init__(self, *, limit_bytes: int, timeout_s: float) -> None:
        self.limit_bytes = limit_bytes
        self.timeout_s = timeout_s
        self._reading: SharedTimer[asyncio.Task[object]] = SharedTimer(timeout_s, _cancel)

    async def read(self, receive: Receive) -> bytes:
        """The whole body. Raises BodyTooLarge, BodyTooSlow or ClientLeft."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            return await _whole(receive, self.limit_bytes)
        except asyncio.CancelledError:
            if not self._reading.remove(task) and task.uncancel() == 0:
                raise BodyTooSlow from None
            raise
        finally:
            self._reading.remove(task)


def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()


async def _whole(receive: Receive, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit_bytes:
            raise BodyTooLarge
        pieces.append(piece)
        if not message.get("more_body", False):
            return piece if len(pieces) == 1 else b"".join(pieces)


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
