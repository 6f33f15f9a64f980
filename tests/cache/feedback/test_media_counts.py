"""Placeholder tokens learned from what engines report."""

from __future__ import annotations

from kvproxy.cache.feedback.media_counts import MediaCounts
from kvproxy.cache.media.cut import Medium, MediumKind


def picture(key: str, width: int = 640, height: int = 480) -> Medium:
    return Medium(MediumKind.IMAGE, key, width, height, 0, 0)


def test_a_reported_count_is_exact_for_the_picture_and_its_size() -> None:
    counts = MediaCounts()
    counts.observe_count("m", [picture("a")], 16)
    assert counts.look_up("m", picture("a")) == 16
    assert counts.look_up("m", picture("b")) == 16
    assert counts.look_up("m", picture("c", 1280, 960)) == 1200


def test_pictures_of_one_size_share_a_count_and_known_ones_are_taken_off() -> None:
    counts = MediaCounts()
    counts.observe_count("m", [picture("a")], 16)
    counts.observe_count("m", [picture("a"), picture("b", 100, 100), picture("c", 100, 100)], 36)
    assert counts.look_up("m", picture("c", 100, 100)) == 10


def test_a_model_that_counts_two_sizes_alike_counts_all_alike() -> None:
    counts = MediaCounts()
    for key, width in (("a", 640), ("b", 1280)):
        counts.observe_count("m", [picture(key, width)], 256)
    assert counts.look_up("m", picture("c", 4000)) == 256


def test_an_estimate_moves_the_size_and_never_an_exact_count() -> None:
    counts = MediaCounts()
    counts.observe_estimate("m", [picture("a")], 100)
    assert counts.look_up("m", picture("a")) == 100
    counts.observe_estimate("m", [picture("a")], 200)
    assert counts.look_up("m", picture("a")) == 130
    counts.observe_count("m", [picture("a")], 111)
    counts.observe_estimate("m", [picture("a")], 500)
    assert counts.look_up("m", picture("a")) == 111


def test_a_count_that_contradicts_what_is_known_is_learned_anew() -> None:
    """A processor's settings changed with the engine."""
    counts = MediaCounts()
    counts.observe_count("m", [picture("a")], 16)
    counts.observe_count("m", [picture("a")], 64)
    counts.observe_count("m", [picture("a")], 64)
    assert counts.look_up("m", picture("a")) == 64


def test_counts_are_kept_by_model() -> None:
    counts = MediaCounts()
    counts.observe_count("m", [picture("a")], 16)
    assert counts.look_up("other", picture("a")) == 300
