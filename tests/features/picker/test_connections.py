"""Connections that nothing comes over: they end in time, and keep no client out."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvproxy.features.picker import grpc
from kvproxy.features.picker.grpc import GrpcServer, Replies
from kvproxy.features.picker.http2_frames import PREFACE
from kvproxy.proxy.request.body import HeldBodies
from tests.features.picker.test_http2 import END_HEADERS, GOAWAY, HEADERS, PING, SETTINGS, Peer, block, frame
from tests.support.until import until

HELLO = PREFACE + frame(SETTINGS, 0, 0)


class Silent:
    """A call that is never answered."""

    def __init__(self, replies: Replies) -> None: ...
    def message(self, raw: bytes) -> None: ...
    def half_closed(self) -> None: ...
    def gone(self) -> None: ...


class Place:
    """A server for two connections, and what it closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.server = GrpcServer(
            {"/x": Silent}, host="127.0.0.1", port=0, held=HeldBodies(1 << 20), most_bytes=1 << 20, max_streams=10,
            max_connections=2, on_closed=self.closed.append,
        )  # fmt: skip

    async def connect(self, stack: AsyncExitStack, hello: bytes = HELLO) -> Peer:
        """One more connection, once the server has it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        stack.callback(writer.close)
        peer = Peer(reader, writer, [], set())
        peer.say(hello)
        if hello == HELLO:
            peer.say(frame(PING, 0, 0, b"12345678"))
            await peer.hear_of(PING)
        return peer


@asynccontextmanager
async def place() -> AsyncIterator[tuple[Place, AsyncExitStack]]:
    one = Place()
    async with one.server, AsyncExitStack() as stack:
        yield one, stack


async def is_closed(peer: Peer) -> bool:
    """Read to the end, which is a reset where the server has not read the peer's last frames."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            while await peer.reader.read(65536):
                pass
    return True


async def test_a_connection_that_does_not_finish_its_preface_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has, stays."""
    monkeypatch.setattr(grpc, "LOOK_S", 0.01)
    async with place() as (one, stack):
        await one.connect(stack)
        half = await one.connect(stack, PREFACE[:10])
        monkeypatch.setattr(grpc, "PREFACE_S", 0.05)
        assert await is_closed(half)
        assert one.closed == ["preface"]
        await until(lambda: len(one.server.connections) == 1)


async def test_an_idle_connection_is_told_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a call stays as long as that takes."""
    monkeypatch.setattr(grpc, "LOOK_S", 0.01)
    async with place() as (one, stack):
        busy = await one.connect(stack)
        busy.say(frame(HEADERS, END_HEADERS, 1, block()))
        await until(lambda: one.server.streams == 1)
        idle = await one.connect(stack)
        monkeypatch.setattr(grpc, "IDLE_S", 0.05)
        assert (await idle.hear_of(GOAWAY))[2] == struct.pack("!II", 0, 0)
        assert await is_closed(idle)
        await until(lambda: len(one.server.connections) == 1)
        assert one.server.streams == 1


async def test_a_new_connection_takes_the_place_of_the_longest_idle_one() -> None:
    """Those with calls are not touched; where all have some, the new one is refused."""
    async with place() as (one, stack):
        older, newer = await one.connect(stack), await one.connect(stack)
        third = await one.connect(stack)
        assert await is_closed(older)
        for peer in (newer, third):
            peer.say(frame(HEADERS, END_HEADERS, 1, block()))
        await until(lambda: one.server.streams == 2)
        refused = await one.connect(stack, PREFACE)
        assert await is_closed(refused)
        assert one.closed == ["replaced", "refused"]


async def test_of_two_idle_since_the_same_tick_the_one_that_came_first_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of uvloop ticks in milliseconds."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1.0, raising=False)
    async with place() as (one, stack):
        peers = [await one.connect(stack) for _ in range(2)]
        for _ in range(8):  # no order of hashes passes all of them
            peers.append(await one.connect(stack))
            await peers[-3].hear_of(GOAWAY)


async def test_one_that_has_not_begun_gives_its_place_first() -> None:
    """It is no client's yet."""
    async with place() as (one, stack):
        await one.connect(stack)
        half = await one.connect(stack, PREFACE[:3])
        await until(lambda: len(one.server.connections) == 2)
        await one.connect(stack)
        assert await is_closed(half)
