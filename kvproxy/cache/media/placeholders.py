"""How many placeholder tokens a model makes of a picture, by its family: first guesses until an engine counts. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from math import ceil, sqrt

from kvproxy.cache.media.cut import Medium, MediumKind

Count = Callable[[int, int], int]

# pixels, by the processors of Qwen2-VL and 2.5-VL
_QWEN_LEAST = 56 * 56
_QWEN_MOST = 12_845_056
_QWEN3_LEAST = 65_536
_QWEN3_MOST = 16_777_216
_PIXTRAL_SIDE = 1024
_TILE = 448
_MAX_TILES = 12
_LLAMA_TILE = 336
_LLAMA_MAX_TILES = 16
#: Pixels per token for an unknown family of models: 32 x 32.
_PIXELS = 1024
#: Tokens of a medium of unknown size, until learned.
_UNKNOWN = {MediumKind.IMAGE: 1024, MediumKind.AUDIO: 256, MediumKind.VIDEO: 4096, MediumKind.FILE: 2048}
_REMEMBERED = 1024


def _qwen(patch: int, least: int, most: int) -> Count:
    """One token for each `patch` x `patch` pixels, the picture scaled between its least and most pixels."""

    def count(width: int, height: int) -> int:
        w, h = (max(patch, round(side / patch) * patch) for side in (width, height))
        if w * h > most:
            scale = sqrt(width * height / most)
            w, h = (max(patch, int(side / scale / patch) * patch) for side in (width, height))
        elif w * h < least:
            scale = sqrt(least / (width * height))
            w, h = (ceil(side * scale / patch) * patch for side in (width, height))
        return w * h // patch**2

    return count


def _pixtral(patch: int) -> Count:
    """One token a patch and one more a row."""

    def count(width: int, height: int) -> int:
        scale = max(1.0, max(width, height) / _PIXTRAL_SIDE)
        columns, rows = (ceil(int(side / scale) / patch) or 1 for side in (width, height))
        return (columns + 1) * rows

    return count


def _tiled(side: int, tokens: int, most: int) -> Count:
    """So many tokens for each tile, and for a thumbnail where there are several."""

    def count(width: int, height: int) -> int:
        tiles = min(most, max(1, round(width / side)) * max(1, round(height / side)))
        return tokens * (tiles + (tiles > 1))

    return count


def _by_pixels(width: int, height: int) -> int:
    return max(1, width * height // _PIXELS)


#: By a part of the model's name; the first match counts.
_FAMILIES: tuple[tuple[re.Pattern[str], Count], ...] = tuple(
    (re.compile(name, re.IGNORECASE), count)
    for name, count in (
        (r"qwen-?3(\.\d)?-?(vl|omni)", _qwen(32, _QWEN3_LEAST, _QWEN3_MOST)),
        (r"qwen-?2(\.5)?-?(vl|omni)", _qwen(28, _QWEN_LEAST, _QWEN_MOST)),
        (r"pixtral|mistral-?(small-?)?3", _pixtral(16)),
        (r"gemma-?3", lambda width, height: 256),
        (r"llava-?(v?1\.5|1\.5)|llava-hf", lambda width, height: 576),
        (r"internvl", _tiled(_TILE, 256, _MAX_TILES)),
        (r"llama-?4", _tiled(_LLAMA_TILE, 144, _LLAMA_MAX_TILES)),
    )
)


@lru_cache(_REMEMBERED)
def _family(model: str) -> Count:
    return next((count for name, count in _FAMILIES if name.search(model)), _by_pixels)


def guess_tokens(model: str, medium: Medium) -> int:
    """Return the tokens that `model` probably makes of a medium."""
    if medium.kind is MediumKind.IMAGE and medium.width:
        return _family(model)(medium.width, medium.height)
    return _UNKNOWN[medium.kind]
