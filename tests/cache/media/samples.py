"""Pictures made by Pillow, of 3 x 2 pixels, and the identifiers that vLLM 0.32's own hasher gives them for `m/x`."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

RGB_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000030000000208020000001216f14d0000000b49444154789c6360c00400001400017dfe1eee"
    "0000000049454e44ae426082"
)
RGBA_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000030000000208060000009d74661a0000000b49444154789c6360c00500001a0001bc3ce041"
    "0000000049454e44ae426082"
)
GREY_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000030000000208000000"
    "00b81f39c60000000b49444154789c636080000000080001b75873950000000049454e44ae426082"
)
GIF = bytes.fromhex("474946383761030002008000000000000000002c00000000030002000008060001081c1810003b")
WEBP = bytes.fromhex("52494646240000005745425056503820180000003001009d012a0300020001402625a400037000fefd366800")
LOSSLESS_RGB_WEBP = bytes.fromhex("524946461a000000574542505650384c0e0000002f02400000071011fd0f4444ff03")
LOSSLESS_RGBA_WEBP = bytes.fromhex("524946461a000000574542505650384c0d0000002f02400010071011118888fe0700")
EXTENDED_RGBA_WEBP = bytes.fromhex(
    "52494646460000005745425056503858"
    "0a00000010000000020000010000414c504807000000000000000000000056503820180000003001009d012a"
    "0300020001402625a400037000fefd366800"
)
IDENTIFIERS = (
    (RGB_PNG, True, "ad70c28e1f1cfffc7df54114be536bb53d585700b49a71b1f24a41739ca5f674"),
    (RGBA_PNG, False, "a435234eec487b5fe9fe0d2c41537cd6ee2051a0498b610767363d47847ce50e"),
    (GREY_PNG, False, "9c5bcc8d24ee4caf702fc1def7587ac87236cd8fed5dbed89dded9566bb2421c"),
)


def png(width: int, height: int, *, seed: int = 0, size_bytes: int = 0) -> bytes:
    """Return a PNG of one color by its seed, with as many further bytes as asked for."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + bytes((seed % 251, seed % 241, seed % 239)) * width) * height
    more = chunk(b"teXt", b"note\0" + bytes(size_bytes)) if size_bytes else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def data_uri(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def picture_part(raw: bytes) -> dict[str, Any]:
    """Return a content part of a chat."""
    return {"type": "image_url", "image_url": {"url": data_uri(raw)}}
