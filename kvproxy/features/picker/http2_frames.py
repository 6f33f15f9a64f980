"""HTTP/2 out of bytes and into them (RFC 9113): frames within bounds, header blocks whole and decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from hpack import Decoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES = 16_384  # the largest frame we take, and the default of the peer's bound
LARGEST = 2**31 - 1  # of stream numbers and windows
_MAX_HEADER_BYTES = 64 * 1024
_HEAD = struct.Struct("!BHBBI")  # length in two parts, kind, flags, stream

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20


class Code(IntEnum):
    """Error codes of RFC 9113, 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer broke the protocol: the whole connection ends."""

    def __init__(self, code: Code, what: str) -> None:
        super().__init__(what)
        self.code = code


Fields = Mapping[bytes, bytes]


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return encode_head(kind, flags, stream, len(payload)) + payload


def encode_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """Return what goes before a frame's payload of so many bytes."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream)


def encode_fields(fields: Mapping[bytes, bytes]) -> bytes:
    """Return a header block without a dynamic table; names and values are shorter than 127 bytes."""
    return b"".join([b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields.items()])


class FrameReader:
    """Cuts frames out of what one peer sends, and holds one that is not whole yet. `on_frame(kind, flags, stream,
    payload)` gets frames without headers, as they are; `on_headers(stream, fields, ended)` each whole header block."""

    def __init__(
        self,
        on_frame: Callable[[int, int, int, bytes], None],
        on_headers: Callable[[int, Fields, bool], None],
    ) -> None:
        self._on_frame = on_frame
        self._on_headers = on_headers
        self._decoder = Decoder(max_header_list_size=_MAX_HEADER_BYTES)
        self._latest: tuple[bytes, Fields] = b"", {}  # the latest header block, if it left the decoder as it was
        self._rest = b""  # an unfinished frame
        self.begun = False  # the preface was read
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags and received part of a header block

    def take(self, data: bytes) -> None:
        """Take the next bytes. Raises ConnectionFault."""
        if self._rest:
            data = self._rest + data
        self._rest = data[self._read(data) :]

    def _read(self, data: bytes) -> int:
        """Return how many bytes were whole frames."""
        size = len(data)
        position = 0
        if not self.begun:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the peer does not speak HTTP/2")
            if size < len(PREFACE):
                return 0
            self.begun = True
            position = len(PREFACE)
        while size - position >= 9:
            high, low, kind, flags, name = _HEAD.unpack_from(data, position)
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame is too long")
            end = position + 9 + length
            if end > size:
                break
            self._take(kind, flags, name & LARGEST, data[position + 9 : end])
            position = end
        return position

    def _take(self, kind: int, flags: int, name: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block was interrupted")
        if kind == HEADERS:
            payload = unpad_frame(flags, payload)
            self._add_to_block(name, flags, payload[5:] if flags & PRIORITISED else payload)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != name:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a continuation without a header block")
            self._add_to_block(name, self._block[1] | flags & END_HEADERS, payload)
        elif kind == PUSH:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a push from a client")
        else:
            self._on_frame(kind, flags, name, payload)

    def _add_to_block(self, name: int, flags: int, payload: bytes) -> None:
        block = bytearray() if self._block is None else self._block[2]
        block += payload
        if not payload and not flags & END_HEADERS and self._block is not None:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block without a continuation")
        if len(block) > _MAX_HEADER_BYTES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & END_HEADERS:
            self._block = (name, flags, block)
            return
        self._block = None
        self._on_headers(name, self._decode(bytes(block)), bool(flags & END_STREAM))

    def _decode(self, block: bytes) -> Fields:
        """Return the fields of a header block. Envoy's are all alike: a repeated one has the same fields if the
        decoder's table is unchanged."""
        if block == self._latest[0]:
            return self._latest[1]
        before = self._table()
        try:
            fields = {field[0]: field[1] for field in self._decoder.decode(block, raw=True)}
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"a header block is broken: {error}") from None
        self._latest = (block, fields) if self._table() == before else (b"", {})
        return fields

    def _table(self) -> tuple[int, Sequence[object]]:
        table = self._decoder.header_table
        return table.maxsize, tuple(table.dynamic_entries)


def unpad_frame(flags: int, payload: bytes) -> bytes:
    """Return the payload without its padding."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
