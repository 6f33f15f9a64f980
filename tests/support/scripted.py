"""An upstream that says exactly the bytes a test gives it, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from kvproxy.base.tls.files import ClientTls
from kvproxy.base.upstream.origin import Origin


class Peer:
    """The engine's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.requests: list[bytes] = []

    async def request(self) -> bytes:
        """Read the next whole request: head, then the body by content-length or chunks."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        body = b""
        if b"transfer-encoding: chunked" in lower:
            while not body.endswith(b"0\r\n\r\n"):
                body += await self.reader.readuntil(b"\r\n")
        elif b"content-length: " in lower:
            length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await self.reader.readexactly(length)
        self.requests.append(head + body)
        return head + body

    async def send(self, data: bytes) -> None:
        """Write now."""
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Return once the proxy closed this connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


class Upstream:
    """Where the scripted engine listens, and the connections it got, in order."""

    def __init__(self) -> None:
        self.origin: Origin
        self.peers: list[Peer] = []


def answer(data: bytes) -> Script:
    """Says the same to every request, until the proxy closes."""

    async def script(peer: Peer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await peer.request()
                await peer.send(data)

    return script


@contextlib.asynccontextmanager
async def scripted(
    *scripts: Script, tls: ssl.SSLContext | None = None, url: str = "http://127.0.0.1", ca_file: str = ""
) -> AsyncIterator[Upstream]:
    """Run scripts[n] on the n-th connection (the last one on all further), closing it when the script returns."""
    upstream = Upstream()
    tasks: set[asyncio.Task[None]] = set()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        peer = Peer(reader, writer)
        script = scripts[min(len(upstream.peers), len(scripts) - 1)]
        upstream.peers.append(peer)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            await script(peer)
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    upstream.origin = Origin.parse(f"{url}:{port}", tls=ClientTls(ca_file))
    try:
        yield upstream
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
