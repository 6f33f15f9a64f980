"""Generations of touches against the touches themselves."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvproxy.cache.indexes.endpoint_lru import AgeHistogram
from kvproxy.cache.indexes.heat import Run

#: (which of a few blocks are touched, generation size); block n is n + 1 blocks long.
TOUCHES = st.lists(st.sets(st.integers(0, 30), min_size=1, max_size=4), min_size=1, max_size=300)


def played(touches: list[set[int]], span: int) -> tuple[AgeHistogram, dict[Run, int]]:
    """Return the generations, and the latest touch of each run."""
    ages, latest = AgeHistogram(), dict[Run, int]()
    runs = [Run(array("Q", range(length + 1))) for length in range(31)]
    for number, touched in enumerate(touches):
        ages.touch_runs([runs[each] for each in sorted(touched)], latest, number, span)
    return ages, latest


def younger(latest: dict[Run, int], touch: int) -> int:
    return sum(len(run.hashes) for run, at in latest.items() if at > touch)


@given(touches=TOUCHES, span=st.integers(1, 60))
def test_the_blocks_touched_since_are_known_to_within_a_generation(touches: list[set[int]], span: int) -> None:
    """A generation is full at `span` blocks; the touch that fills it may bring up to 124 more, and half counts."""
    ages, latest = played(touches, span)
    for touch in latest.values():
        assert abs(ages.count_younger(touch) - younger(latest, touch)) <= (span + 124) / 2


@given(touches=TOUCHES)
def test_tidying_up_changes_no_answer(touches: list[set[int]]) -> None:
    """Touches nothing depends on any more lose their number."""
    ages, latest = played(touches, 20)
    before = {touch: ages.count_younger(touch) for touch in latest.values()}
    kept = sorted(before)
    ages.renumber_touches(kept)
    assert [ages.count_younger(number) for number in range(len(kept))] == [before[touch] for touch in kept]


def test_generations_that_emptied_are_put_together() -> None:
    """One prompt asked for again and again beside an old one that is not evicted."""
    old, hot = Run(array("Q", range(50))), Run(array("Q", range(10)))
    ages, latest = AgeHistogram(), dict[Run, int]()
    ages.touch_runs([old], latest, 0, 10)
    for touch in range(1, 1000):
        ages.touch_runs([hot], latest, touch, 10)
    assert len(ages._first) <= 48
    assert ages.count_younger(0) == 10 + 50 // 2
    assert ages.count_younger(999) == 10 // 2


def test_a_dropped_entry_has_no_age() -> None:
    old, dropped = Run(array("Q", range(30))), Run(array("Q", range(12)))
    ages, latest = AgeHistogram(), dict[Run, int]()
    ages.touch_runs([old], latest, 0, 10)
    ages.touch_runs([dropped], latest, 1, 10)
    ages.change_count(1, -12)
    assert ages.count_younger(0) == 30 // 2
