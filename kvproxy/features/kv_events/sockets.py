"""The two ZeroMQ sockets of one stream: the subscription, which connects again by itself, and a replay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from kvproxy.base.errors import BadResponse, ClientTimeout
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.features.kv_events.decoding import END_OF_REPLAY, MAX_PAYLOAD_BYTES
from kvproxy.features.kv_events.zmtp import ReceiveMemory, ZmtpConnection, open_connection, parse_address

#: Read-ahead of a subscription. Batches beyond it wait in the engine's own queue (100,000 in vLLM).
AHEAD_BYTES = 1 << 20

#: More batches than any engine's replay buffer holds: a replay that goes on beyond is broken.
MAX_REPLAYED_BATCHES = 200_000

#: A batch has three frames; its payload, and a little for topic, number and framing.
_MAX_FRAMES = 16
_MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + (1 << 16)

_RECONNECT_S = 0.1
_RECONNECT_MAX_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


class Subscription:
    """A SUB socket that reports when its connection comes and goes, and connects again by itself. Made inside a running
    event loop; ValueError for an address that is none."""

    def __init__(self, source: KvEventSource) -> None:
        parse_address(source.endpoint)
        self._source = source
        self._changes: list[bool] = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()  # no message of an earlier connection is left
        self._connection: ZmtpConnection | None = None
        self._task = asyncio.create_task(self._stay_connected(), name=f"kv events {source.endpoint}")

    async def wait_for_news(self, timeout_s: float | None) -> None:
        """Return when something happened, or after `timeout_s`."""
        if self._changes or (self._connection is not None and self._connection.has_message):
            await asyncio.sleep(0)
            return
        self._wake.clear()
        if timeout_s is None:
            await self._wake.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    def take_connections(self) -> list[bool]:
        """Return what happened to the connection since the last call: True for up, False for down."""
        changes = self._changes
        self._changes = []
        return changes

    def take_message(self) -> list[bytes] | None:
        """Return the next message, if there is one."""
        connection = self._connection
        if connection is None:
            return None
        found = connection.take_message()
        if found is None and connection.lost and not connection.has_message:
            self._taken.set()
        return found

    def close(self) -> None:
        """End the subscription."""
        self._task.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _stay_connected(self) -> None:
        pause_s = _RECONNECT_S
        while True:
            if await self._follow_one():
                pause_s = _RECONNECT_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RECONNECT_MAX_S)

    async def _follow_one(self) -> bool:
        """One connection from its beginning until the last message of it was taken; whether it came to be."""
        happened = asyncio.Event()

        def changed() -> None:
            if self._connection is not connection or connection.lost:  # else a message alone, for `take_message`
                happened.set()
            self._wake.set()

        memory = ReceiveMemory(limit_bytes=AHEAD_BYTES, connection_bytes=AHEAD_BYTES)
        connection = _connection(b"SUB", changed, memory)
        try:
            if not await self._shake_hands(connection, happened):
                return False
            self._connection = connection
            connection.send_message([b"\x01" + self._source.topic.encode()])
            self._note(up=True)
            while not connection.lost:
                happened.clear()
                await happened.wait()
            self._taken.clear()
            self._note(up=False)
            if connection.has_message:
                await self._taken.wait()
            return True
        finally:
            connection.close()

    async def _shake_hands(self, connection: ZmtpConnection, happened: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await open_connection(self._source.endpoint, connection)
                while not (connection.ready or connection.lost):
                    happened.clear()
                    await happened.wait()
        except (OSError, UnicodeError):  # a timeout among them; names that cannot be looked up
            return False
        return connection.ready

    def _note(self, *, up: bool) -> None:
        self._changes.append(up)
        self._wake.set()


async def read_replay(
    address: str, start: int, *, idle_timeout_s: float, memory: ReceiveMemory | None = None
) -> AsyncGenerator[list[bytes], None]:
    """Messages of a replay from batch `start` on, the end marker last.

    They are read ahead within `memory`, since a replay comes as fast as the engine can send, and what does not fit its
    queue is dropped. Raises ClientTimeout when nothing comes for `idle_timeout_s`, BadResponse when it has no end.
    """
    happened = asyncio.Event()
    connection = _connection(b"DEALER", happened.set, memory or ReceiveMemory())

    async def until_something(what: str) -> None:
        happened.clear()
        try:
            async with asyncio.timeout(idle_timeout_s):
                await happened.wait()
        except TimeoutError:
            raise ClientTimeout(f"kv events: replay {what} for {idle_timeout_s:g} s") from None

    try:
        await _connect(address, connection, idle_timeout_s)
        while not connection.ready and not connection.lost:
            await until_something("not connected")
        connection.send_message([b"", start.to_bytes(8, "big")])
        for _ in range(MAX_REPLAYED_BATCHES):
            while (frames := connection.take_message()) is None:
                if connection.lost:
                    raise BadResponse(f"kv events: the replay broke off: {connection.error or 'closed'}")
                await until_something("silent")
            yield frames
            if len(frames) > 1 and frames[-2] == END_OF_REPLAY:
                return
        raise BadResponse("kv events: a replay without end")
    finally:
        connection.close()


async def _connect(address: str, connection: ZmtpConnection, within_s: float) -> None:
    """Try until it succeeds; ClientTimeout after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    await open_connection(address, connection)
                except (OSError, UnicodeError):
                    await asyncio.sleep(_RECONNECT_S)
                else:
                    return
    except TimeoutError:
        raise ClientTimeout(f"kv events: replay not connected for {within_s:g} s") from None


def _connection(socket_type: bytes, changed: Callable[[], None], memory: ReceiveMemory) -> ZmtpConnection:
    return ZmtpConnection(
        socket_type, changed=changed, memory=memory, max_message_bytes=_MAX_MESSAGE_BYTES, max_frames=_MAX_FRAMES
    )
