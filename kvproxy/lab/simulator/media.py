"""Pictures, audio and video in the prompts of a simulated engine: their placeholder tokens and their identity.

vLLM puts N copies of one token in the place of a medium and names the blocks that it touches by the medium's
identifier; SGLang puts four ids of 62 bits there in turn, which name it themselves.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from blake3 import blake3

#: The placeholder of a medium, as Qwen numbers it.
PLACEHOLDER = 151_655
#: Placeholder of a medium in the rendered text until that is tokenized; no client's text has it.
MARK = "\ue000medium\ue000"

_PATCH = 28  # pixels of a side that make one token, as of Qwen2.5-VL
_OTHER_TOKENS = 256  # of media other than readable pictures
_WIDE_FROM = 1_000_000
_WIDE_BITS = (1 << 62) - 1
_WIDE_IDS = 4
_MAX_NAMED = 1024
_IMAGE = "image"
#: Modalities by the types of content parts.
_KINDS = {
    "image_url": _IMAGE,
    "input_image": _IMAGE,
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "input_file": "file",
    "file": "file",
}
_WHITE = (255, 255, 255)  # behind pictures with an alpha channel
_PNG_RGB = 2
_RGB_COMPONENTS = 3


class MediaError(ValueError):
    """A medium that the engine cannot load; the text is its answer to the client."""


class RenderedMedium(msgspec.Struct, frozen=True):
    """One medium as the engine's processor makes it."""

    kind: str  # modality
    identifier: str
    tokens: int


class PlacedMedium(msgspec.Struct, frozen=True):
    """The same in a prompt."""

    medium: RenderedMedium
    start: int  # token

    def touches(self, first: int, end: int) -> bool:
        """Return True if one of the tokens from `first` up to `end` is its placeholder."""
        return self.start < end and first < self.start + self.medium.tokens


class MediaPrompt(list[int]):
    """Token ids of a prompt, and where its media are."""

    def __init__(self, tokens: Sequence[int] = (), media: Sequence[PlacedMedium] = ()) -> None:
        super().__init__(tokens)
        self.media = tuple(media)


def media_of(prompt: Sequence[int]) -> tuple[PlacedMedium, ...]:
    """Return the media of a prompt; () of plain token ids."""
    return prompt.media if isinstance(prompt, MediaPrompt) else ()


def media_keys(media: Sequence[PlacedMedium], block: int, block_size: int) -> tuple[tuple[str, int], ...]:
    """Return identifier and offset of each medium that a block touches, as vLLM's events have them."""
    first = block * block_size
    return tuple(
        [(one.medium.identifier, one.start - first) for one in media if one.touches(first, first + block_size)]
    )


def count_by_kind(media: Sequence[PlacedMedium]) -> dict[str, int]:
    """Count placeholder tokens by modality."""
    counts: dict[str, int] = {}
    for one in media:
        counts[one.medium.kind] = counts.get(one.medium.kind, 0) + one.medium.tokens
    return counts


class MediaLoader:
    """Makes a medium of a content part. `model` is the name that identifiers are made with (`root`)."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._named: dict[str, RenderedMedium] = {}  # by a client's `uuid`

    def load(self, part: Mapping[str, Any]) -> RenderedMedium | None:
        """Return the medium of a content part, None for a part without one. Raises MediaError."""
        kind = _KINDS.get(str(part.get("type")))
        if kind is None:
            return None
        given = _content_of(part)
        name = part.get("uuid")
        if given is None:
            found = self._named.get(name) if isinstance(name, str) else None
            if found is None:
                raise MediaError(f"No {kind} data and no cached item for its uuid")
            return found
        medium = self._loaded(kind, given)
        if isinstance(name, str):
            medium = self._named[name] = msgspec.structs.replace(medium, identifier=name)
            if len(self._named) > _MAX_NAMED:
                del self._named[next(iter(self._named))]
        return medium

    def _loaded(self, kind: str, given: str) -> RenderedMedium:
        if not given.startswith("data:"):
            return _named_by(kind, given.encode())
        try:
            raw = base64.b64decode(given.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise MediaError(f"Invalid base64-encoded {kind}") from error
        size = _read_size(raw) if kind == _IMAGE else None
        if size is None:
            return _named_by(kind, raw)
        width, height, rgb = size
        columns = max(1, round(width / _PATCH))
        rows = max(1, round(height / _PATCH))
        return RenderedMedium(kind, identify_picture(raw, self._model, rgb=rgb), columns * rows)


def identify_picture(raw: bytes, model: str, *, rgb: bool) -> str:
    """Return vLLM's identifier of a picture: a digest of its arguments in the order of their names."""
    item: Any = raw if rgb else {"io_config": {"image_mode": b"RGB", "rgba_background_color": _WHITE}, "data": raw}
    image = _encoded(b"image") + _encoded(item)
    name = _encoded(model.encode())
    return blake3(_framed(b"image") + image + _framed(b"model_id") + name).hexdigest()


def _encoded(value: Any) -> bytes:
    if isinstance(value, dict):
        items = b"".join(_framed(name.encode()) + _encoded(inner) for name, inner in value.items())
        return b"\x02" + struct.pack("<Q", len(value)) + items
    if isinstance(value, tuple):
        return b"\x01" + struct.pack("<Q", len(value)) + b"".join(map(_encoded, value))
    return b"\x03" + _framed(struct.pack("<q", value) if isinstance(value, int) else value)


def _framed(piece: bytes) -> bytes:
    return struct.pack("<Q", len(piece)) + piece


def _read_size(raw: bytes) -> tuple[int, int, bool] | None:
    """Width, height and whether it decodes as RGB, of a PNG, a GIF or a JPEG."""
    try:
        if raw.startswith(b"\x89PNG"):
            width, height, _, color = struct.unpack(">IIBB", raw[16:26])
            return width, height, color == _PNG_RGB
        if raw.startswith(b"GIF8"):
            return (*struct.unpack("<HH", raw[6:10]), False)
        return _read_jpeg(raw) if raw.startswith(b"\xff\xd8") else None
    except struct.error:
        return None


def _read_jpeg(raw: bytes) -> tuple[int, int, bool]:
    at = 2
    while True:
        _, marker, length = struct.unpack(">BBH", raw[at : at + 4])
        if marker in (0xC0, 0xC1, 0xC2):
            height, width, components = struct.unpack(">HHB", raw[at + 5 : at + 10])
            return width, height, components == _RGB_COMPONENTS
        at += 2 + length


def _named_by(kind: str, content: bytes) -> RenderedMedium:
    return RenderedMedium(kind, hashlib.sha256(kind.encode() + content).hexdigest(), _OTHER_TOKENS)


def place_media(pieces: Sequence[Sequence[int]], media: Sequence[RenderedMedium], *, wide: bool) -> MediaPrompt:
    """Return the prompt of tokenized pieces of text with a medium between each two of them."""
    tokens = list(pieces[0])
    placed = []
    for medium, piece in zip(media, pieces[1:], strict=True):
        placed.append(PlacedMedium(medium, len(tokens)))
        ids = _wide_ids(medium.identifier) if wide else [PLACEHOLDER]
        tokens += (ids * (medium.tokens // len(ids) + 1))[: medium.tokens]
        tokens += piece
    return MediaPrompt(tokens, placed)


def _wide_ids(identifier: str) -> list[int]:
    digest = hashlib.sha256(b"sglang-mm-wide-pad-v1" + identifier.encode()).digest()
    pieces = [digest[8 * number : 8 * number + 8] for number in range(_WIDE_IDS)]
    return [_WIDE_FROM + (int.from_bytes(piece, "big") & _WIDE_BITS) for piece in pieces]


def _content_of(part: Mapping[str, Any]) -> str | None:
    """Return the URL or data URI of a part; None: it names what was sent before."""
    value = part.get(str(part["type"]))
    if value is None:
        value = part.get("image_url") or part.get("file_data") or part.get("file_url") or part.get("file_id")
    if isinstance(value, Mapping):
        data = value.get("data") or value.get("file_data")
        value = value.get("url") if data is None else data if str(data).startswith("data:") else f"data:;base64,{data}"
    return None if value is None else str(value)
