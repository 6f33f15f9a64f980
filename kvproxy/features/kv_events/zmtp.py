"""One connection that speaks ZMTP 3.0, the protocol of ZeroMQ sockets, without security (mechanism NULL).

libzmq is not used: when a socket whose receive queue is full loses its connection, libzmq 4.3 ends the whole process by
an assertion (zeromq/libzmq#3937, #4767), and it puts no bound on the frames of one message. Here the bytes of one
connection are bounded, and what is not taken waits in the sender's queue. A message takes 8 to 18 us of CPU, 29 to 51
us with pyzmq's socket for asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

_MORE = 1
_LONG = 2
_COMMAND = 4

_GREETING_BYTES = 64
#: Signature, version 3.0, mechanism, as-server, filler.
_GREETING = b"\xff" + 8 * b"\0" + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + 31 * b"\0"

#: A peer silent for this long gets a ping; silent for the second time, it is lost.
PING_AFTER_S = 5.0
LOST_AFTER_S = 15.0
_PING = b"\x04PING"
_PONG = b"\x04PONG"

#: Commands obeyed before others run; answers to them that a peer may leave unread.
_COMMANDS_AT_ONCE = 64
_MAX_UNSENT_BYTES = 1 << 16


class ZmtpError(Exception):
    """The peer does not speak ZMTP 3, refuses us, or sends more in one message than is taken."""


class ReceiveMemory:
    """Bytes received and not yet taken, over all connections that share it: each reads on while it holds less than
    `connection_bytes` and all together less than `limit_bytes`, or for as long as it holds no whole message."""

    def __init__(self, *, limit_bytes: int = 256 << 20, connection_bytes: int = 64 << 20) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._connection_bytes = connection_bytes

    def has_room(self, own_bytes: int) -> bool:
        """Return True if a connection that holds `own_bytes` may read on."""
        return own_bytes < self._connection_bytes and self.held_bytes < self._limit_bytes


class MessageBuffer:
    """Bytes after the greeting, cut into messages and commands. No I/O.

    A message of more than `max_message_bytes` or `max_frames` raises ZmtpError.
    """

    def __init__(self, *, max_message_bytes: int, max_frames: int) -> None:
        self._data = bytearray()
        self._max_bytes = max_message_bytes
        self._max_frames = max_frames
        self._frames: list[tuple[int, int]] = []  # start and end of those of the next message that are known
        self._scanned = 0  # up to here
        self._needed = 1  # bytes needed to learn more of the next message
        self._complete = False

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        if not self._max_frames:
            return  # closed: no further message
        self._data += data

    @property
    def complete(self) -> bool:
        """True if the next message or command has arrived as a whole."""
        if not self._complete and len(self._data) >= self._needed:
            self._scan()
        return self._complete

    def take(self) -> tuple[bool, list[bytes]] | None:
        """Return whether the next is a command, and its frames; None: it has not arrived as a whole."""
        if not self.complete:
            return None
        data = self._data
        is_command = bool(data[0] & _COMMAND)
        with memoryview(data) as view:
            frames = [bytes(view[start:end]) for start, end in self._frames]
        del data[: self._scanned]
        self._frames = []
        self._scanned = 0
        self._needed = 1
        self._complete = False
        return is_command, frames

    def _scan(self) -> None:
        data = self._data
        while True:
            at = self._scanned
            if len(data) <= at:
                self._needed = at + 1
                return
            flags = data[at]
            head = 9 if flags & _LONG else 2
            if len(data) < at + head:
                self._needed = at + head
                return
            size = int.from_bytes(data[at + 1 : at + head], "big")
            end = at + head + size
            if len(self._frames) >= self._max_frames or end > self._max_bytes:
                raise ZmtpError("a message with more frames or bytes than are taken")
            if len(data) < end:
                self._needed = end
                return
            self._frames.append((at + head, end))
            self._scanned = end
            if not flags & _MORE:
                self._complete = True
                return


class ZmtpConnection(asyncio.Protocol):
    """A connection from its greeting to its loss. `changed` is called when it is ready, has a message, or is lost.

    After the loss, whole messages that came before it can still be taken.
    """

    def __init__(
        self,
        socket_type: bytes,
        *,
        changed: Callable[[], None],
        memory: ReceiveMemory,
        max_message_bytes: int,
        max_frames: int,
    ) -> None:
        self.ready = False
        self.lost = False
        self.error: Exception | None = None
        self._socket_type = socket_type
        self._changed = changed
        self._memory = memory
        self._greeting = b""
        self._buffer = MessageBuffer(max_message_bytes=max_message_bytes, max_frames=max_frames)
        self._held = 0
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._heard = False  # since the last look
        self._silent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._transport.write(_GREETING)
        self._timer = asyncio.get_running_loop().call_later(PING_AFTER_S, self._look)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            self._receive(data)
        except ZmtpError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.ready = False
        self.error = self.error or error
        if self._timer is not None:
            self._timer.cancel()
        self._count()
        self._changed()

    @property
    def has_message(self) -> bool:
        """True if `message` can return something, if only a command."""
        try:
            return bool(self._held) and self._buffer.complete
        except ZmtpError as error:
            self._fail(error)
            return False

    def take_message(self) -> list[bytes] | None:
        """Return the next whole message, if there is one; commands of the peer are obeyed on the way, a few
        at a time."""
        found = None
        if not self._held:
            return None
        try:
            for _ in range(_COMMANDS_AT_ONCE):
                taken = self._buffer.take()
                if taken is None:
                    break
                is_command, frames = taken
                if not is_command:
                    found = frames
                    break
                self._obey(frames[0])
        except ZmtpError as error:
            self._fail(error)
        self._count()
        return found

    def send_message(self, frames: Sequence[bytes]) -> None:
        last = len(frames) - 1
        self._write(b"".join(_frame(frame, 0 if index == last else _MORE) for index, frame in enumerate(frames)))

    def close(self) -> None:
        """End the connection and forgets what came."""
        self._buffer = MessageBuffer(max_message_bytes=0, max_frames=0)
        self._memory.held_bytes -= self._held
        self._held = 0
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, data: bytes) -> None:
        if len(self._greeting) < _GREETING_BYTES:
            missing = _GREETING_BYTES - len(self._greeting)
            self._greeting += data[:missing]
            data = data[missing:]
            _check_greeting(self._greeting)
            if len(self._greeting) == _GREETING_BYTES:
                self._write(_frame(_ready(self._socket_type), _COMMAND))
        self._buffer.feed(data)
        if not self.ready:
            self._shake_hands()
        self._count()
        if self._buffer.complete:
            self._changed()

    def _shake_hands(self) -> None:
        taken = self._buffer.take()
        if taken is None:
            if len(self._buffer) > 4096:
                raise ZmtpError("no READY")
            return
        is_command, frames = taken
        if not (is_command and frames[0].startswith(b"\x05READY")):
            raise ZmtpError("the peer refuses us" if is_command else "no READY")
        self.ready = True
        self._changed()

    def _obey(self, command: bytes) -> None:
        if command.startswith(_PING):
            self._write(_frame(_PONG + command[7:23], _COMMAND))
        elif command.startswith(b"\x05ERROR"):
            raise ZmtpError("the peer ends the connection by an error")

    def _count(self) -> None:
        """Keep the account of held bytes, and stops or resumes reading by it."""
        held = len(self._buffer)
        self._memory.held_bytes += held - self._held
        self._held = held
        transport = self._transport
        if transport is None or self.lost or transport.is_closing():
            return
        if not held and not self._paused:
            return
        pause = not self._memory.has_room(held) and self._buffer.complete
        if pause != self._paused:
            self._paused = pause
            (transport.pause_reading if pause else transport.resume_reading)()

    def _look(self) -> None:
        """Check the peer for silence, unless reading is paused on purpose."""
        self._silent_s = 0.0 if self._heard or self._paused else self._silent_s + PING_AFTER_S
        self._heard = False
        try:
            if self._silent_s >= LOST_AFTER_S:
                raise ZmtpError(f"silent for {LOST_AFTER_S:g} s")
            if self._silent_s and self.ready:
                self._write(_frame(_PING + b"\0\0", _COMMAND))
        except ZmtpError as error:
            self._fail(error)
        self._timer = asyncio.get_running_loop().call_later(PING_AFTER_S, self._look)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                raise ZmtpError("the peer does not read")
            self._transport.write(data)

    def _fail(self, error: ZmtpError) -> None:
        self.error = error
        self._buffer = MessageBuffer(max_message_bytes=0, max_frames=0)
        if self._transport is not None:
            self._transport.abort()


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def _ready(socket_type: bytes) -> bytes:
    properties = ((b"Socket-Type", socket_type), (b"Identity", b""))
    told = b"".join(bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in properties)
    return b"\x05READY" + told


def _check_greeting(greeting: bytes) -> None:
    """As far as it has come. Raises ZmtpError for what is no ZMTP 3 without security."""
    if greeting[:1] not in (b"", b"\xff") or greeting[9:10] not in (b"", b"\x7f"):
        raise ZmtpError("the peer does not speak ZMTP")
    if len(greeting) > 10 and greeting[10] < 3:
        raise ZmtpError("the peer speaks an older ZMTP than 3")
    if len(greeting) == _GREETING_BYTES and greeting[12:32].rstrip(b"\0") != b"NULL":
        raise ZmtpError("the peer wants a security mechanism")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; the path of `ipc://path`, and 0. ValueError for anything else."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return rest, 0
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address of a ZeroMQ socket: {address!r}")
    return host.strip("[]"), int(port)


async def open_connection(address: str, connection: ZmtpConnection) -> None:
    """Connect. Raises OSError, and ValueError as `parse_address`."""
    loop = asyncio.get_running_loop()
    host, port = parse_address(address)
    if port:
        await loop.create_connection(lambda: connection, host, port)
    else:
        await loop.create_unix_connection(lambda: connection, host)
