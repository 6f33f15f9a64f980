"""Short calls the tests of this room share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import Body, Timeouts, UpstreamPool, UpstreamResponse

PATIENT = Timeouts(connect_s=60, first_byte_s=60, idle_s=60)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
HEAD_ONLY = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def post(
    pool: UpstreamPool,
    origin: Origin,
    body: Body = b"hello",
    *,
    method: bytes = b"POST",
    headers: Headers | None = None,
    timeouts: Timeouts = PATIENT,
) -> UpstreamResponse:
    """One request."""
    return await pool.request(origin, method, b"/v1", headers or [], body, timeouts=timeouts)


async def read(response: UpstreamResponse) -> bytes:
    """Return the whole body."""
    body = b""
    while data := await response.next_chunk():
        body += data
    return body


async def fetch(pool: UpstreamPool, origin: Origin, body: Body = b"hello", *, timeouts: Timeouts = PATIENT) -> bytes:
    """One request and its whole response body."""
    return await read(await post(pool, origin, body, timeouts=timeouts))


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until it holds (60 s at most, so that a failure is a failure)."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is the pool's own state, which has no event
            await asyncio.sleep(0.001)


async def pieces(*data: bytes, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """Yield a body piece by piece; before its end it waits for `then`."""
    for piece in data:
        yield piece
    if then is not None:
        await then.wait()
