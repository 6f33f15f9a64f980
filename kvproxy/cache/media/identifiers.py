"""The identifier that vLLM gives a picture: a digest of its bytes and the model's name. Pure.

vLLM 0.29 and later frame each piece of the digest's input: the length as 8 bytes, little endian, then the piece. A tag
stands in front of a value: 1 for a sequence and 2 for a mapping, each followed by its length, and 3 for anything else.
Engines that use another algorithm, other processor arguments or an adapter of the vision tower have other identifiers;
those are learned from their KV events.
"""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

_LENGTH_BYTES = 8
_SEQUENCE = b"\x01"
_MAPPING = b"\x02"
_LEAF = b"\x03"
_WHITE = (255, 255, 255)  # behind pictures with an alpha channel

#: Takes the name of the model as the engine calls it (`root` in `/v1/models`) and returns the identifier.
Identify = Callable[[str], str]


def digest_picture(raw: bytes, *, rgb: bool) -> Identify:
    """Digest the bytes of a picture once, for any model. `rgb`: the picture decodes as RGB and is not converted."""
    digest = blake3(_framed(b"image") + _LEAF + _framed(b"image"))
    if rgb:
        digest.update(_LEAF)
    else:
        digest.update(_CONVERTED)
    digest.update(_length(len(raw)))
    digest.update(raw)

    def identify(model: str) -> str:
        whole = digest.copy()
        whole.update(_framed(b"model_id") + _LEAF + _framed(model.encode("utf-8", "surrogatepass")))
        return whole.hexdigest()

    return identify


def _length(value: int) -> bytes:
    return value.to_bytes(_LENGTH_BYTES, "little")


def _framed(piece: bytes) -> bytes:
    return _length(len(piece)) + piece


def _number(value: int) -> bytes:
    return _LEAF + _framed(value.to_bytes(8, "little", signed=True))


#: The mapping of a picture that vLLM converts to RGB, up to its bytes.
_CONVERTED = b"".join(
    (
        _MAPPING,
        _length(2),
        _framed(b"io_config"),
        _MAPPING,
        _length(2),
        _framed(b"image_mode"),
        _LEAF + _framed(b"RGB"),
        _framed(b"rgba_background_color"),
        _SEQUENCE,
        _length(len(_WHITE)),
        *map(_number, _WHITE),
        _framed(b"data"),
        _LEAF,
    )
)
