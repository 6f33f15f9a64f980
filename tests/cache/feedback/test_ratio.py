"""Bytes a token, learned per model."""

from __future__ import annotations

import pytest

from kvproxy.cache.feedback.token_counts import DEFAULT_BYTES_PER_TOKEN, BytesPerToken


def test_an_unknown_model_has_the_usual_ratio() -> None:
    ratios = BytesPerToken()
    assert ratios.look_up("m") == ratios.typical == DEFAULT_BYTES_PER_TOKEN


def test_the_first_response_replaces_the_guess() -> None:
    ratios = BytesPerToken()
    ratios.observe_prompt("m", 6000, 1000)
    assert ratios.look_up("m") == 6.0
    assert ratios.look_up("other") == DEFAULT_BYTES_PER_TOKEN


def test_later_responses_move_it_slowly() -> None:
    """One odd prompt does not upset the estimate of all others."""
    ratios = BytesPerToken()
    ratios.observe_prompt("m", 4000, 1000)
    ratios.observe_prompt("m", 8000, 1000)
    assert 4.0 < ratios.look_up("m") < 4.5
    for _ in range(200):
        ratios.observe_prompt("m", 8000, 1000)
    assert ratios.look_up("m") == pytest.approx(8.0, rel=0.01)


def test_short_prompts_and_nonsense_teach_nothing() -> None:
    ratios = BytesPerToken()
    ratios.observe_prompt("m", 4000, 3)
    ratios.observe_prompt("m", 0, 1000)
    assert ratios.look_up("m") == DEFAULT_BYTES_PER_TOKEN


def test_extremes_are_clipped() -> None:
    ratios = BytesPerToken()
    ratios.observe_prompt("m", 10_000_000, 20)
    assert ratios.look_up("m") == 64.0


def test_models_are_bounded() -> None:
    """Clients name models: they must not fill the memory."""
    ratios = BytesPerToken(max_models=10)
    for number in range(100):
        ratios.observe_prompt(f"m{number}", 4000, 1000)
    assert len(ratios) == 10


def test_another_life_goes_on_from_what_was_learned() -> None:
    """Within the bound, the models answered last; what no engine could have counted is left out."""
    ratios = BytesPerToken()
    for number in range(4):
        ratios.observe_prompt(f"m{number}", 3000 + number, 1000)
    again = BytesPerToken(max_models=3)
    again.resume_from({**ratios.learned, "m3": 1e9})
    assert again.learned == {"m1": 3.001, "m2": 3.002}
