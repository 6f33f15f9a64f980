"""A client that says exactly the bytes a test gives it, and small apps to talk to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write now."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """Return the next response head, lower case."""
        async with asyncio.timeout(60):
            return (await self.reader.readuntil(b"\r\n\r\n")).lower()

    async def response(self) -> tuple[bytes, bytes]:
        """Return the next response with content-length: head in lower case, body."""
        head = await self.head()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        async with asyncio.timeout(60):
            return head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Everything until the server closes; a reset ends it as well."""
        data = b""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    data += piece
        return data


async def opened(url: str) -> Client:
    """Open a connection to the server at `url`; the caller closes it."""
    host, port = url.removeprefix("http://").split(":")
    return Client(*await asyncio.open_connection(host, int(port)))


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    """Open the same, closed at the end of the block."""
    client = await opened(url)
    try:
        yield client
    finally:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


async def body_of(receive: Any) -> bytes:
    """Return the whole request body."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers method, path and body, with a length."""
    body = await body_of(receive)
    text = scope["method"].encode() + b" " + scope["raw_path"] + b"?" + scope["query_string"] + b" " + body
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})
