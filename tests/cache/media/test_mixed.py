"""Text and media of a prompt on one scale."""

from __future__ import annotations

import pytest

from kvproxy.cache.media.cut import HEAD_OF_STAND_IN, Medium, MediumKind
from kvproxy.cache.media.mixed import MixedPrompt

MEDIA = (Medium(MediumKind.IMAGE, "a", 0, 0, 400, 200), Medium(MediumKind.IMAGE, "b", 0, 0, 1000, 200))
PROMPT = MixedPrompt(MEDIA, (16, 1000), bytes_per_token=4.0)


@pytest.mark.parametrize(
    ("position", "tokens"),
    [
        (0, 0),
        (400, 100),
        (400 + HEAD_OF_STAND_IN - 1, 100),
        (400 + HEAD_OF_STAND_IN, 116),
        (600, 116),
        (1000, 216),
        (1199, 1216),
        (1600, 1316),
    ],
)
def test_a_medium_counts_once_its_key_is_matched(position: int, tokens: int) -> None:
    assert PROMPT.tokens_before(position) == tokens


@pytest.mark.parametrize(("tokens", "position"), [(0, 0), (50, 200), (110, 400), (116, 600), (700, 1000), (1216, 1200)])
def test_tokens_stand_for_bytes_and_a_partial_medium_for_none(tokens: int, position: int) -> None:
    assert PROMPT.bytes_before(tokens) == position
