"""The streams of one connection of HTTP/2: opened, given data, and held to the windows of both sides."""

from __future__ import annotations

import struct
from collections.abc import Callable

from kvproxy.features.picker import http2_frames as wire
from kvproxy.features.picker.http2_frames import Code, ConnectionFault, Fields, encode_frame, unpad_frame
from kvproxy.features.picker.http2_stream import PeerOutput, Stream, StreamHandler

_SET_STREAMS = 3
_SET_WINDOW = 4
_SET_FRAME = 5
_STREAM_WINDOW = 1024 * 1024
_WINDOW_BYTES = 16 * 1024 * 1024
_DEFAULT_WINDOW = 65_535
#: Bytes waiting to be sent on a stream from which its own window is not enlarged.
_MAX_WAITING_BYTES = 256 * 1024


class Streams:
    """Streams that a peer opens, at most `max_streams` at a time. `accept` makes the handler of a stream from its
    header fields, and `on_empty` is called when the last one ended."""

    def __init__(
        self,
        accept: Callable[[Stream, Fields], StreamHandler],
        *,
        output: PeerOutput,
        max_streams: int,
        on_empty: Callable[[], None],
    ) -> None:
        self.there: dict[int, Stream] = {}
        self.output = output
        self.credit = _DEFAULT_WINDOW
        self.peer_frame_bytes = wire.FRAME_BYTES
        self._accept = accept
        self._max_streams = max_streams
        self._on_empty = on_empty
        self._peer_window = _DEFAULT_WINDOW
        self._received = 0
        self._blocked: dict[int, Stream] = {}
        self._leaving = False
        self._last = 0
        self._takers = {
            wire.DATA: self._take_data,
            wire.RESET: self._take_reset,
            wire.SETTINGS: self._take_settings,
            wire.PING: self._take_ping,
            wire.WINDOW: self._take_window,
        }

    def greet(self) -> None:
        """Send our settings."""
        settings = struct.pack("!HIHI", _SET_STREAMS, self._max_streams, _SET_WINDOW, _STREAM_WINDOW)
        more = (_WINDOW_BYTES - _DEFAULT_WINDOW).to_bytes(4, "big")
        self.output.write(encode_frame(wire.SETTINGS, 0, 0, settings) + encode_frame(wire.WINDOW, 0, 0, more))

    def leave(self, code: Code) -> None:
        """Take no new streams; those there are go on."""
        if not self._leaving:
            self._leaving = True
            self.output.write(encode_frame(wire.GOAWAY, 0, 0, struct.pack("!II", self._last, code)))

    def drop(self) -> None:
        """End all streams: the connection is lost."""
        streams = list(self.there.values())
        self.there = {}
        for stream in streams:
            stream.closed = True
            stream.handler.gone()

    def block(self, stream: Stream) -> None:
        """Note that the stream waits for a window."""
        self._blocked[stream.id] = stream

    def unblock(self) -> None:
        """Let streams that waited for a window go on."""
        blocked = self._blocked
        self._blocked = {}
        for stream in blocked.values():
            stream.pump()

    def forget(self, stream: Stream) -> None:
        """Forget a stream that ended."""
        self.there.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        if not self.there:
            self._on_empty()

    def grant(self, stream: Stream) -> None:
        """Let the peer send more on a stream that has taken half its window, and takes what it is sent."""
        if stream.received >= _STREAM_WINDOW // 2 and stream.waiting_bytes < _MAX_WAITING_BYTES and not stream.closed:
            self.output.write(encode_frame(wire.WINDOW, 0, stream.id, stream.received.to_bytes(4, "big")))
            stream.received = 0

    def take(self, kind: int, flags: int, name: int, payload: bytes) -> None:
        """Handle a frame that carries no header fields; unknown kinds are ignored."""
        if take := self._takers.get(kind):
            take(flags, name, payload)

    def open(self, name: int, fields: Fields, ended: bool) -> None:
        """Handle the header fields of a stream: its first ones, or its trailers."""
        stream = self.there.get(name)
        if stream is None:
            if name <= self._last:
                return  # trailers of a stream that is over
            if not name & 1:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a client's streams have odd numbers")
            if self._leaving:
                return
            self._last = name
            if len(self.there) >= self._max_streams:
                self.output.write(encode_frame(wire.RESET, 0, name, Code.REFUSED_STREAM.to_bytes(4, "big")))
                return
            stream = self.there[name] = Stream(self, name, self._peer_window)
            stream.handler = self._accept(stream, fields)
        if ended:
            _half_close(stream)

    def _take_data(self, flags: int, name: int, payload: bytes) -> None:
        if not name or (name > self._last and not self._leaving):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "data on a stream that was never opened")
        self._received += len(payload)
        if self._received >= _WINDOW_BYTES // 2:
            self.output.write(encode_frame(wire.WINDOW, 0, 0, self._received.to_bytes(4, "big")))
            self._received = 0
        stream = self.there.get(name)
        if stream is None or stream.peer_ended:
            return
        stream.received += len(payload)
        if stream.received > _STREAM_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream has more in flight than its window")
        if payload:
            stream.handler.received(unpad_frame(flags, payload))
            self.grant(stream)
        if flags & wire.END_STREAM:
            _half_close(stream)

    def _take_reset(self, _: int, name: int, payload: bytes) -> None:
        if len(payload) != 4 or (name > self._last and not self._leaving):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a reset without a stream")
        stream = self.there.get(name)
        if stream is not None:
            stream.closed = True
            self.forget(stream)
            stream.handler.gone()

    def _take_settings(self, flags: int, _: int, payload: bytes) -> None:
        if flags & wire.ACK:
            return
        if len(payload) % 6:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "settings are cut off")
        window = self._peer_window
        for setting, value in struct.iter_unpack("!HI", payload):
            if setting == _SET_WINDOW:
                if value > wire.LARGEST:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window is too large")
                window = value
            elif setting == _SET_FRAME:
                self.peer_frame_bytes = min(max(value, wire.FRAME_BYTES), 4 * wire.FRAME_BYTES)
        change = window - self._peer_window
        self._peer_window = window
        for stream in self.there.values() if change else ():
            stream.credit += change
        self.output.answer(encode_frame(wire.SETTINGS, wire.ACK, 0))
        self.unblock()

    def _take_ping(self, flags: int, _: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a ping has eight bytes")
        if not flags & wire.ACK:
            self.output.answer(encode_frame(wire.PING, wire.ACK, 0, payload))

    def _take_window(self, _: int, name: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & wire.LARGEST
        if len(payload) != 4 or not more:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a window grows by 0")
        if not name:
            self.credit += more
            if self.credit > wire.LARGEST:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window is too large")
            self.unblock()
            return
        if stream := self.there.get(name):
            stream.credit += more
            if stream.id in self._blocked:
                stream.pump()


def _half_close(stream: Stream) -> None:
    if not stream.closed:
        stream.peer_ended = True
        stream.handler.half_closed()
