"""The ZMQ sockets of one stream: the subscription with its connection monitor, and a replay."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvproxy.clients.kv_events.codec import END_OF_REPLAY, MAX_PAYLOAD_BYTES
from kvproxy.clients.kv_events.source import KvEventSource
from kvproxy.errors import BadResponse, ClientTimeout

#: Batches ZMQ holds for us while we are busy. It counts messages, not bytes: few, so that the largest fit 64 MiB.
#: Beyond it nothing is lost: ZMQ stops reading, and batches wait in the engine's own queue (100,000 of them in vLLM).
QUEUED_BATCHES = 8

#: More batches than any engine's replay buffer holds: a replay that goes on beyond is broken.
MAX_REPLAYED_BATCHES = 200_000

#: Messages of a replay read ahead before one of them is handled.
_READ_AT_ONCE = 64

#: A batch has three frames.
_MAX_FRAMES = 16

_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 5000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5000, 15_000


class Subscription:
    """A SUB socket that says when its connection comes and goes. ZMQ reconnects by itself."""

    def __init__(self, context: zmq.asyncio.Context, source: KvEventSource) -> None:
        self._socket = context.socket(zmq.SUB)
        try:
            self._configure(source)
        except BaseException:
            self._socket.close(linger=0)
            raise
        # Draining goes through plain sockets: a future for every message would cost more than the message.
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._plain_monitor: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    async def wait(self, timeout_s: float | None) -> None:
        """Returns when something happened, or after `timeout_s`."""
        await self._poller.poll(None if timeout_s is None else max(1, round(timeout_s * 1000)))

    def connections(self) -> list[bool]:
        """What happened to the connection since the last call: True for up, False for down."""
        changes: list[bool] = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._plain_monitor.recv_multipart(zmq.NOBLOCK))
                changes.append(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return changes

    def message(self) -> list[bytes] | None:
        """The next message, if there is one; of one with more frames than any engine sends, a few at a time."""
        return _message(self._plain)

    def close(self) -> None:
        """Ends the subscription."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _configure(self, source: KvEventSource) -> None:
        options: dict[Any, int] = {
            zmq.RCVHWM: QUEUED_BATCHES,
            zmq.MAXMSGSIZE: MAX_PAYLOAD_BYTES,
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
            zmq.IPV6: "[" in source.endpoint,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(source.endpoint)
        except BaseException:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            raise


class ReplayMemory:
    """Bytes of replays that were read ahead, over all streams that share it; each may hold one message more.

    They are read ahead since a replay comes as fast as the engine can send, and what does not fit its queue is dropped.
    """

    def __init__(self, *, limit_bytes: int = 256 << 20, stream_bytes: int = 64 << 20) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._stream_bytes = stream_bytes

    def has_room(self, own_bytes: int) -> bool:
        """Whether a stream that holds `own_bytes` may read on."""
        return own_bytes < self._stream_bytes and self.held_bytes < self._limit_bytes


class _ReadAhead:
    """One replay's messages, taken from ZMQ as soon as there is room for them."""

    def __init__(self, socket: zmq.asyncio.Socket, memory: ReplayMemory) -> None:
        self._socket = socket
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._memory = memory
        self._messages: deque[list[bytes]] = deque()
        self._bytes = 0

    async def next(self, *, within_s: float) -> list[bytes] | None:
        """The next message; None when there is none for `within_s`."""
        self._fill()
        while not self._messages:
            if not await self._socket.poll(max(1, round(within_s * 1000))):
                return None
            self._fill()
        frames = self._messages.popleft()
        self._hold(-sum(map(len, frames)))
        return frames

    def close(self) -> None:
        """Gives back what is held."""
        self._messages.clear()
        self._hold(-self._bytes)

    def _fill(self) -> None:
        for _ in range(_READ_AT_ONCE):
            if self._messages and not self._memory.has_room(self._bytes):
                return
            frames = _message(self._plain)
            if frames is None:
                return
            self._messages.append(frames)
            self._hold(sum(map(len, frames)))

    def _hold(self, more: int) -> None:
        self._bytes += more
        self._memory.held_bytes += more


def _message(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message, if there is one; of one with more frames than any engine sends, a few at a time."""
    try:
        frames = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while len(frames) < _MAX_FRAMES and socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv())
    return frames


async def replayed(
    context: zmq.asyncio.Context,
    address: str,
    start: int,
    *,
    idle_timeout_s: float,
    memory: ReplayMemory | None = None,
) -> AsyncGenerator[list[bytes], None]:
    """Messages of a replay from batch `start` on, the end marker last.

    Raises ClientTimeout when nothing comes for `idle_timeout_s`, BadResponse when it has no end.
    """
    socket = context.socket(zmq.DEALER)
    ahead = _ReadAhead(socket, memory or ReplayMemory())
    try:
        socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.connect(address)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        for _ in range(MAX_REPLAYED_BATCHES):
            frames = await ahead.next(within_s=idle_timeout_s)
            if frames is None:
                raise ClientTimeout(f"kv events: replay silent for {idle_timeout_s:g} s")
            yield frames
            if len(frames) > 1 and frames[-2] == END_OF_REPLAY:
                return
        raise BadResponse("kv events: a replay without end")
    finally:
        ahead.close()
        socket.close(linger=0)
