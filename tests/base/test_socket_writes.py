"""Buffers written together, to real sockets, on asyncio's own event loop and on uvloop."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvproxy
from kvproxy.base.socket_writes import write_pieces


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


class Writer(asyncio.Protocol):
    """Protocol that records that its transport paused and resumed it."""

    def __init__(self) -> None:
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.lost = asyncio.Event()

    def pause_writing(self) -> None:
        self.paused.set()

    def resume_writing(self) -> None:
        self.resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.Transport, Writer, socket.socket]]:
    """Yield a transport, its protocol, and the socket at the other end, which nothing reads."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    transport, writer = await asyncio.get_running_loop().create_connection(Writer, sock=near)
    try:
        yield transport, writer, far
    finally:
        if not writer.lost.is_set():
            transport.abort()
        await writer.lost.wait()
        far.close()


async def read(far: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        data += await asyncio.get_running_loop().sock_recv(far, size_bytes - len(data))
    return bytes(data)


async def test_pieces_arrive_in_order_with_empty_ones_among_them() -> None:
    """An empty piece changes nothing, at either end or in the middle."""
    async with connected() as (transport, _, far):
        write_pieces(transport, (b"", b"head ", b"", memoryview(b"body"), b""))
        assert await asyncio.wait_for(read(far, 9), 10) == b"head body"


async def test_a_transport_closes_once_the_peer_has_all() -> None:
    """A trailing empty piece must not keep the transport writing: it would never close, and use a core meanwhile."""
    async with connected() as (transport, writer, far):
        write_pieces(transport, (b"head", b"x" * 1_000_000, b""))
        transport.close()
        await asyncio.wait_for(read(far, 1_000_004), 10)
        await asyncio.wait_for(writer.lost.wait(), 10)


async def test_a_peer_that_reads_nothing_pauses_the_writer() -> None:
    """Without the pause a slow reader makes the buffer grow without bound."""
    async with connected() as (transport, writer, far):
        write_pieces(transport, (b"head", b"x" * 4_000_000))
        await asyncio.wait_for(writer.paused.wait(), 10)
        await asyncio.wait_for(read(far, 4_000_004), 10)
        await asyncio.wait_for(writer.resumed.wait(), 10)


async def test_pieces_after_the_connection_was_aborted_are_dropped() -> None:
    async with connected() as (transport, _, _far):
        transport.abort()
        write_pieces(transport, (b"head", b"body"))
        assert transport.get_write_buffer_size() == 0


def test_only_this_file_calls_writelines() -> None:
    """Every other call would meet the defects of asyncio's own transports."""
    package = Path(kvproxy.__file__).parent
    callers = {path.name for path in package.rglob("*.py") if re.search(r"\.writelines\(", path.read_text())}
    assert callers == {"socket_writes.py"}
