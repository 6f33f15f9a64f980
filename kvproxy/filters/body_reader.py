"""Reads a request body whole, within a size and a time."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive


class BodyTooLarge(Exception):
    """The body is longer than the limit; at most that much of it was held."""


class BodyTooSlow(Exception):
    """The body did not arrive in time."""


class ClientLeft(Exception):
    """The client closed the connection before its body was complete."""


class _Deadline:
    """Cancels the current task once `after_s` have passed; a third of what `asyncio.timeout` costs."""

    __slots__ = ("_expired", "_handle", "_task")

    def __init__(self, after_s: float) -> None:
        self._expired = False
        self._task = asyncio.current_task()
        self._handle = asyncio.get_running_loop().call_later(after_s, self._expire)

    def cancel(self) -> None:
        self._handle.cancel()

    def claims(self) -> bool:
        """Whether the cancellation just caught came from here and from nobody else."""
        return self._expired and self._task is not None and self._task.uncancel() == 0

    def _expire(self) -> None:
        self._expired = True
        assert self._task is not None
        self._task.cancel()


async def read_body(receive: Receive, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTooSlow or ClientLeft."""
    deadline = _Deadline(timeout_s)
    try:
        return await _read(receive, limit_bytes)
    except asyncio.CancelledError:
        if deadline.claims():
            raise BodyTooSlow from None
        raise
    finally:
        deadline.cancel()


async def _read(receive: Receive, limit_bytes: int) -> bytes:
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
