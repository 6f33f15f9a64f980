"""Sends a request body that arrives piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from kvproxy.errors import UnsafeRequest

Write = Callable[[bytes], Awaitable[None]]


def chunked(data: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
#: The kernel takes what it is given in one go: 31 MiB would hold the event loop for 20 ms.
SLICE_BYTES = 1024 * 1024


async def in_slices(body: bytes) -> AsyncIterator[bytes]:
    """A long body, with a turn for others after each slice."""
    for start in range(0, len(body), SLICE_BYTES):
        yield body[start : start + SLICE_BYTES]
        await asyncio.sleep(0)


async def send_body(write: Write, body: AsyncIterator[bytes], *, length_bytes: int | None) -> None:
    """Writes the whole body, chunked when `length_bytes` is None.

    Raises UnsafeRequest when the body turns out longer or shorter than was announced: the connection must then be
    closed, since the engine would read the next request as the rest of this one.
    """
    sent_bytes = 0
    async for piece in body:
        if not piece:
            continue
        sent_bytes += len(piece)
        if length_bytes is None:
            await write(chunked(piece))
        elif sent_bytes > length_bytes:
            raise UnsafeRequest(f"a body longer than its content-length {length_bytes}")
        else:
            await write(piece)
    if length_bytes is None:
        await write(LAST_CHUNK)
    elif sent_bytes != length_bytes:
        raise UnsafeRequest(f"a body of {sent_bytes} bytes with content-length {length_bytes}")
