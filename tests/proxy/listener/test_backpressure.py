"""A client's bytes are parsed as its requests take them, and no further."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvproxy.proxy.listener.arrivals import HIGH_WATER_BYTES
from tests.proxy.listener.wire import Wire
from tests.support.until import until

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


def chunked(body: bytes, size_bytes: int) -> bytes:
    """Return an upload of this body in chunks of that size."""
    pieces = [body[at : at + size_bytes] for at in range(0, len(body), size_bytes)]
    chunks = b"".join([b"%x\r\n%b\r\n" % (len(each), each) for each in pieces])
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


FORM = b"a line of a form\r\n" * 20_000


@pytest.mark.parametrize(
    ("body", "upload"),
    [
        (FORM, chunked(FORM, 1000)),
        (FORM, chunked(FORM, 1)),
        (FORM, HEAD + b"content-length: %d\r\n\r\n" % len(FORM) + FORM),
    ],
    ids=["chunks", "chunks of a byte", "lines"],
)
async def test_a_body_is_parsed_no_further_than_its_app_takes_it(body: bytes, upload: bytes) -> None:
    """However it is framed and whatever is in it: beyond a bound it stays with the client until the app read on."""
    go, taken = asyncio.Event(), list[bytes]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        await go.wait()
        while more:
            message = await receive()
            taken.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    wire = Wire(app)
    said = asyncio.create_task(wire.say([upload[at : at + 32_768] for at in range(0, len(upload), 32_768)]))
    await wire.settle()
    assert not wire.reading
    go.set()
    await said
    await until(lambda: bool(wire.output))
    assert b"".join(taken) == body
    assert max(map(len, taken)) < HIGH_WATER_BYTES + 2 * 32_768
    assert wire.reading
