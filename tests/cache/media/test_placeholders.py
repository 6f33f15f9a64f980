"""First guesses of a picture's tokens by the family of the model."""

from __future__ import annotations

import pytest

from kvproxy.cache.media.cut import Medium, MediumKind
from kvproxy.cache.media.placeholders import guess_tokens


def picture(width: int, height: int) -> Medium:
    return Medium(MediumKind.IMAGE, "k", width, height, 0, 0)


@pytest.mark.parametrize(
    ("model", "width", "height", "tokens"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", 1280, 960, 46 * 34),
        ("Qwen/Qwen3-VL-8B", 1280, 960, 40 * 30),
        ("Qwen/Qwen2-VL-2B", 10, 10, 4),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 20_000, 10_000, 16_290),
        ("mistralai/Pixtral-12B", 1024, 512, 65 * 32),
        ("google/gemma-3-4b-it", 4000, 3000, 256),
        ("llava-hf/llava-1.5-7b-hf", 64, 64, 576),
        ("OpenGVLab/InternVL3-8B", 896, 448, 256 * 3),
        ("meta-llama/Llama-4-Scout", 336, 336, 144),
        ("some-model", 1280, 960, 1200),
    ],
)
def test_families_count_by_their_formula(model: str, width: int, height: int, tokens: int) -> None:
    assert guess_tokens(model, picture(width, height)) == tokens


def test_media_of_unknown_size_have_a_guess_too() -> None:
    assert all(guess_tokens("m", Medium(kind, "k", 0, 0, 0, 0)) > 0 for kind in MediumKind)
