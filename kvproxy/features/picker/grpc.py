"""gRPC over HTTP/2: methods by path, length-prefixed messages, statuses, the listener with its drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Protocol, Self

from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.features.picker.http2 import Ended, Http2Connection, Stream, StreamHandler
from kvproxy.features.picker.http2_frames import Code, Fields, encode_fields
from kvproxy.proxy.request.body import BodiesFull, HeldBodies
from kvproxy.proxy.settings import ListenerTls

log = logging.getLogger("kvproxy.picker")

#: A handshake of TLS takes no longer, and so does the preface after it.
_HANDSHAKE_S = 10.0
PREFACE_S = 5.0
#: How long a connection without a call stays open, and the interval of checks.
IDLE_S = 600.0
LOOK_S = 1.0
_PREFIX_BYTES = 5
_HEAD = encode_fields({b":status": b"200", b"content-type": b"application/grpc"})


class Status(IntEnum):
    """gRPC's status codes, as far as they are used."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Call(Protocol):
    """The server's part of one call: `message` for each that comes, `half_closed` once the peer sends no more; then
    `gone` where the peer left before we ended the call. None of them waits."""

    def message(self, raw: bytes) -> None: ...
    def half_closed(self) -> None: ...
    def gone(self) -> None: ...


class Replies:
    """Replies of one call."""

    __slots__ = ("_begun", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._begun = False

    def send(self, raw: bytes, more: bytes | memoryview = b"") -> None:
        """One message, of which `more` is the end."""
        self._begin()
        self._stream.send(b"".join((b"\0", (len(raw) + len(more)).to_bytes(4, "big"), raw, more)))

    def end(self, status: Status = Status.OK, text: str = "") -> None:
        """Nothing more comes. `text` is our own: plain ASCII, short, without a percent sign."""
        self._begin()
        fields = {b"grpc-status": b"%d" % status}
        self._stream.finish(encode_fields(fields | {b"grpc-message": text.encode()[:100]} if text else fields))

    def _begin(self) -> None:
        if not self._begun and not self._stream.closed:
            self._begun = True
            self._stream.start(_HEAD)


#: Begins the call of one method.
Method = Callable[[Replies], Call]


class _Messages:
    """Parser of messages in one stream's data. The bytes of an unfinished one count among all bodies."""

    def __init__(self, stream: Stream, method: Method, *, held: HeldBodies, most_bytes: int) -> None:
        self._stream = stream
        self._held = held
        self._most = most_bytes
        self._replies = Replies(stream)
        self._call = method(self._replies)
        self._pieces: list[bytes] = []
        self._size = 0

    def received(self, data: bytes) -> None:
        if not self._pieces:  # nearly always a whole message
            data = self._deliver(data)
            if not data:
                return
        try:
            self._held.hold_bytes(len(data))
        except BodiesFull:
            self._refuse(Status.RESOURCE_EXHAUSTED, "too much is being uploaded at once")
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size < _PREFIX_BYTES:
            return
        if len(self._pieces[0]) < _PREFIX_BYTES:
            self._pieces = [b"".join(self._pieces)]
        if self._size >= self._wanted(self._pieces[0]):
            whole = b"".join(self._pieces)
            self._drop()
            if rest := self._deliver(whole):
                self.received(rest)

    def half_closed(self) -> None:
        if self._pieces:
            self._refuse(Status.INVALID_ARGUMENT, "the last message is cut off")
        else:
            self._call.half_closed()

    def gone(self) -> None:
        self._drop()
        self._call.gone()

    def _deliver(self, data: bytes) -> bytes:
        """Hands over the whole messages at the beginning of `data`; the rest of it."""
        position = 0
        size = len(data)
        while size - position >= _PREFIX_BYTES and not self._stream.closed:
            end = position + self._wanted(data, position)
            if end > size or self._stream.closed:
                break
            try:
                self._call.message(data[position + _PREFIX_BYTES : end])
            except Exception:  # the others on this connection are other requests
                log.exception("a call of the picker failed")
                self._refuse(Status.INTERNAL, "the picker failed; its log says why")
            position = end
        return b"" if self._stream.closed else data[position:]

    def _wanted(self, data: bytes, position: int = 0) -> int:
        """Bytes of the message that begins there, with its prefix."""
        length = int.from_bytes(data[position + 1 : position + _PREFIX_BYTES], "big")
        if data[position]:
            self._refuse(Status.UNIMPLEMENTED, "compressed messages are not read")
        elif length > self._most:
            self._refuse(Status.RESOURCE_EXHAUSTED, "a message is larger than limits.body")
        return _PREFIX_BYTES + length

    def _refuse(self, status: Status, text: str) -> None:
        if not self._stream.closed:
            self._drop()
            self._replies.end(status, text)
            self._stream.reset(Code.CANCEL)
            self._call.gone()

    def _drop(self) -> None:
        self._held.give_back(self._size)
        self._pieces = []
        self._size = 0


class GrpcServer:
    """Serves `methods`, by path, for the length of the block; what runs at its end has `drain_s` to finish."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        host: str,
        port: int,
        held: HeldBodies,
        most_bytes: int,
        max_streams: int,
        max_connections: int,
        tls: ListenerTls | None = None,
        certificates: CertificateWatch | None = None,
        drain_s: float = 0.0,
        on_closed: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._methods = {path.encode(): method for path, method in methods.items()}
        self._host = host
        self._port = port
        self._tls = tls
        self._certificates = certificates or CertificateWatch()
        self._drain_s = drain_s
        self._held = held
        self._most = most_bytes
        self._max_streams = max_streams
        self._max_connections = max_connections
        self.connections: dict[Http2Connection, None] = {}  # in the order they came: uvloop's clock is coarse
        self._idle = asyncio.Event()
        self._on_closed = on_closed
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The bound port, also when asked for port 0."""
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def streams(self) -> int:
        """Open calls."""
        return sum(len(connection.streams) for connection in self.connections)

    async def __aenter__(self) -> Self:
        tls = self._tls
        context = None
        if tls is not None:
            context = self._certificates.server_context("picker", tls.files, alpn=["h2"])
        loop = asyncio.get_running_loop()
        limit_s = None if context is None else _HANDSHAKE_S
        self._server = await loop.create_server(
            self._connect, self._host, self._port, ssl=context, ssl_handshake_timeout=limit_s, backlog=1024
        )
        self._look_again = loop.call_later(LOOK_S, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        self._server.close()
        for connection in list(self.connections):
            connection.leave()
            connection.close_if_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self.connections:
                    self._idle.clear()
                    await self._idle.wait()
        for connection in list(self.connections):
            connection.abort()

    def _connect(self) -> asyncio.BaseProtocol:
        return Http2Connection(self._accept, max_streams=self._max_streams, on_change=self._changed)

    def _look(self) -> None:
        """Close connections that do not begin, and those that stay without a call."""
        loop = asyncio.get_running_loop()
        self._look_again = loop.call_later(LOOK_S, self._look)
        now = loop.time()
        for connection in [one for one in self.connections if not one.streams]:
            silent_s = now - connection.idle_since
            if not connection.begun and silent_s > PREFACE_S:
                self._on_closed("preface")
                connection.abort()
            elif silent_s > IDLE_S:
                self._on_closed("idle")
                connection.end_idle()

    def _free_place(self) -> None:
        """Close the connection that has been without a call for longest; those that have not begun come first."""
        idle = [one for one in self.connections if not one.streams]
        if idle:
            oldest = min(idle, key=lambda one: (one.begun, one.idle_since))
            self._on_closed("replaced")
            self.connections.pop(oldest, None)
            oldest.end_idle()

    def _changed(self, connection: Http2Connection, there: bool) -> None:
        if not there:
            self.connections.pop(connection, None)
            self._idle.set()
            return
        if len(self.connections) >= self._max_connections:
            self._free_place()
        if len(self.connections) < self._max_connections:
            self.connections[connection] = None
        else:
            log.warning("a connection to the picker is refused: all %d are busy", self._max_connections)
            self._on_closed("refused")
            connection.close_if_idle()

    def _accept(self, stream: Stream, fields: Fields) -> StreamHandler:
        method = self._methods.get(fields.get(b":path", b""))
        if method is None:
            Replies(stream).end(Status.UNIMPLEMENTED, "no such method")
            return Ended()
        return _Messages(stream, method, held=self._held, most_bytes=self._most)
