"""Durations of engine steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvproxy.lab.simulator.timing import EngineTiming, Stretch


def test_prefill_in_chunks_costs_what_it_costs_in_one() -> None:
    """The quadratic term is additive: chunking changes latency of others, not the work."""
    timing = EngineTiming()
    whole = timing.prefill_s(5000, 1000)
    parts = timing.prefill_s(2048, 1000) + timing.prefill_s(2048, 3048) + timing.prefill_s(904, 5096)
    assert parts == pytest.approx(whole)


def test_prefill_gets_dearer_with_what_is_cached_before_it() -> None:
    """10 k tokens/s at the start of a prompt, half of it after 32 k cached tokens."""
    timing = EngineTiming()
    assert timing.prefill_s(100, 0) == pytest.approx(0.01, rel=0.01)
    assert timing.prefill_s(100, 32_000) == pytest.approx(0.02, rel=0.01)


def test_decode_step_counts_sequences_and_resident_kv() -> None:
    """8 ms, 0.05 ms a sequence, 0.02 ms a resident block of 512 tokens."""
    assert EngineTiming().decode_s(10, 5120) == pytest.approx(0.008 + 0.0005 + 0.0002)


def test_slowness_changes_at_its_times() -> None:
    """Each factor holds from its moment on; the time scale multiplies all of them."""
    timing = EngineTiming(slowness=2.0, slowness_changes=((10.0, 6.0), (20.0, 1.0)), time_scale=0.5)
    assert [timing.factor_at(t) for t in (0.0, 9.9, 10.0, 19.0, 20.0, 99.0)] == [1.0, 1.0, 3.0, 3.0, 0.5, 0.5]
    assert [timing.next_change_after(t) for t in (0.0, 10.0, 20.0)] == [10.0, 20.0, math.inf]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_tokens_per_s": 0},
        {"quadratic_tokens": -1},
        {"decode_step_s": 0},
        {"prefill_floor_s": -0.001},
        {"time_scale": 0},
        {"slowness": 0},
        {"slowness_changes": ((1.0, 0.0),)},
        {"slowness_changes": ((2.0, 1.0), (1.0, 1.0))},
    ],
)
def test_nonsense_speeds_are_refused(wrong: dict[str, Any]) -> None:
    """Zero, negative and unordered values never reach the engine."""
    with pytest.raises(ValueError, match="must be"):
        EngineTiming(**wrong)


@pytest.mark.parametrize("growth_s", [0.0, 0.001])
def test_a_cut_stretch_ends_with_the_step_under_way(growth_s: float) -> None:
    """Whatever the moment, the stretch ends at the first step end at or after it."""
    full = Stretch(5.0, 0.01, growth_s, 40)
    ends = [Stretch(5.0, 0.01, growth_s, steps).ends_at for steps in range(1, 41)]
    for moment in [5.0, 5.005, 5.01, 5.0101, 5.2, ends[7], ends[7] + 1e-6, ends[-1], ends[-1] + 1]:
        stretch = Stretch(full.started_at, full.step_s, full.growth_s, full.steps)
        stretch.cut(moment)
        expected = next((end for end in ends if end >= moment - 1e-9), ends[-1])
        assert stretch.ends_at == pytest.approx(expected)
