"""Width and height of a picture, read from its first bytes. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

#: Bytes of a picture that are read at most; the EXIF data of a JPEG precede its size.
HEAD_BYTES = 64 * 1024
#: Larger sides are not those of a picture that an engine takes.
_MAX_SIDE = 65_535
_PNG = b"\x89PNG\r\n\x1a\n"
_GIF = (b"GIF87a", b"GIF89a")
#: JPEG markers that begin a frame; DHT (C4), JPG (C8) and DAC (CC) do not.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_WEBP_HEAD_BYTES = 30


class Picture(msgspec.Struct, frozen=True):
    """Size of a picture in pixels."""

    width: int
    height: int


def read_picture(head: bytes) -> Picture | None:
    """Return the picture that begins with `head`, or None for another format or one that cannot be read."""
    try:
        found = _read(head)
    except (struct.error, IndexError):
        return None
    if found is None or not (0 < found.width <= _MAX_SIDE and 0 < found.height <= _MAX_SIDE):
        return None
    return found


def _read(head: bytes) -> Picture | None:
    if head.startswith(_PNG) and head[12:16] == b"IHDR":
        return Picture(*struct.unpack(">II", head[16:24]))
    if head.startswith(b"\xff\xd8"):
        return _read_jpeg(head)
    if head.startswith(_GIF):
        return Picture(*struct.unpack("<HH", head[6:10]))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _read_webp(head)
    return None


def _read_jpeg(head: bytes) -> Picture | None:
    for marker, at in _jpeg_segments(head):
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack(">HH", head[at + 3 : at + 7])
            return Picture(width, height)
    return None


def _jpeg_segments(head: bytes) -> Iterator[tuple[int, int]]:
    """Yield the marker and the position of each segment's length."""
    at = 2
    while head[at] == 0xFF:
        marker = head[at + 1]
        at += 2 if marker != 0xFF else 1  # a fill byte may precede
        if marker == 0xFF or marker in _JPEG_ALONE:
            continue
        yield marker, at
        (length,) = struct.unpack(">H", head[at : at + 2])
        at += max(length, 2)


def _read_webp(head: bytes) -> Picture | None:
    kind = head[12:16]
    if len(head) < _WEBP_HEAD_BYTES:
        return None
    if kind == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        return Picture(width, height)
    if kind == b"VP8L" and head[20] == 0x2F:
        (bits,) = struct.unpack("<I", head[21:25])
        return Picture((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        return Picture(width & 0x3FFF, height & 0x3FFF)
    return None
