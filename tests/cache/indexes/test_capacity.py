"""Which evidence moves a capacity, and how far."""

from __future__ import annotations

import pytest

from kvproxy.cache.indexes.capacity import MOST_BLOCKS, LearnedCapacity, ReuseHistogram, capacity_of


def kept(under_test: LearnedCapacity, age: int, times: int = 1) -> None:
    for _ in range(times):
        under_test.observe_reuse(age_blocks=age, known_blocks=40, reused_blocks=40, full=True)


def gone(under_test: LearnedCapacity, age: int, times: int = 1, reused: int = 0) -> list[bool]:
    return [
        under_test.observe_reuse(age_blocks=age, known_blocks=40, reused_blocks=reused, full=True) for _ in range(times)
    ]


def forgotten(under_test: LearnedCapacity, times: int, *, full: bool = True) -> None:
    """Report reuse of blocks that the index did not have."""
    for _ in range(times):
        under_test.observe_reuse(age_blocks=None, known_blocks=0, reused_blocks=40, full=full)


def test_it_begins_as_reported() -> None:
    assert LearnedCapacity(1000).blocks == 1000


def test_prefixes_gone_at_an_age_make_it_smaller_than_that_age() -> None:
    under_test = LearnedCapacity(4000)
    kept(under_test, 900, 5)
    gone(under_test, 1500, 5)
    assert 900 <= under_test.blocks <= 1500


def test_two_losses_prove_nothing() -> None:
    """Another cause is as likely."""
    under_test = LearnedCapacity(4000)
    kept(under_test, 900)
    gone(under_test, 1500, 2)
    assert under_test.blocks == 4000


def test_prefixes_kept_at_the_far_end_ask_for_more() -> None:
    under_test = LearnedCapacity(1000)
    kept(under_test, 950, 3)
    assert under_test.blocks == pytest.approx(1189, abs=1)


def test_a_forgotten_prefix_asks_for_more_at_once() -> None:
    """The engine holds what this capacity denies: half an octave a step, until a loss says otherwise."""
    under_test = LearnedCapacity(1000)
    forgotten(under_test, 3)
    assert under_test.blocks == pytest.approx(1414, abs=1)


def test_an_index_with_room_left_has_forgotten_nothing() -> None:
    """Then another client's request was reused: no word about room."""
    under_test = LearnedCapacity(1000)
    forgotten(under_test, 100, full=False)
    assert under_test.blocks == 1000


def test_young_prefixes_that_are_kept_change_nothing() -> None:
    under_test = LearnedCapacity(1000)
    kept(under_test, 10, 1000)
    kept(under_test, 500, 1000)
    assert under_test.blocks == 1000


def test_a_step_too_far_is_taken_back() -> None:
    """And not tried again soon: what was gone there is remembered."""
    under_test = LearnedCapacity(1000)
    kept(under_test, 950, 3)
    gone(under_test, 1150, 4)
    assert 950 <= under_test.blocks <= 1150
    kept(under_test, 950, 50)
    assert under_test.blocks <= 1189


def test_losses_of_other_causes_do_not_outvote_what_is_kept_at_that_age() -> None:
    """Every third prefix of any age is gone: another salt, a request that may not use the cache."""
    under_test = LearnedCapacity(1000)
    for age in (200, 400, 600, 700, 200, 300, 500, 800) * 20:
        kept(under_test, age, 2)
        gone(under_test, age)
    assert under_test.blocks == pytest.approx(1000, rel=0.2)


@pytest.mark.parametrize("reported", [1000, 17])
def test_it_stays_within_a_factor_of_eight(reported: int) -> None:
    low, high = LearnedCapacity(reported), LearnedCapacity(reported)
    for _ in range(100):
        gone(low, max(2, low.blocks * 9 // 10))
        kept(low, max(1, low.blocks // 100))
        forgotten(high, 3)
    assert low.blocks == pytest.approx(reported / 8, rel=0.25, abs=2)
    assert high.blocks == 8 * reported


def test_it_never_grows_beyond_what_memory_is_for() -> None:
    under_test = LearnedCapacity(MOST_BLOCKS // 2)
    forgotten(under_test, 100)
    assert under_test.blocks == MOST_BLOCKS
    assert LearnedCapacity(4 * MOST_BLOCKS).blocks == 4 * MOST_BLOCKS


def test_an_engine_that_lost_everything_is_noticed_and_its_capacity_kept() -> None:
    """Blocks requested a moment ago are gone as well: no capacity explains that."""
    under_test = LearnedCapacity(1000)
    for age in (400, 500, 700):
        kept(under_test, age, 10)
    said = [gone(under_test, age)[0] for age in (10, 500, 20, 700, 300, 5, 900, 100)]
    assert said == [False] * 7 + [True]
    kept(under_test, 700, 5)
    assert under_test.blocks == pytest.approx(1000, rel=0.2)


def test_losses_between_others_that_are_kept_are_no_lost_cache() -> None:
    """A client whose requests may not use the cache, among those that do."""
    under_test = LearnedCapacity(1000)
    for _ in range(20):
        assert not any(gone(under_test, 10, 7))
        kept(under_test, 10)


def test_old_prefixes_alone_are_no_lost_cache() -> None:
    """That is what a cache too small looks like."""
    assert not any(gone(LearnedCapacity(1000), 800, 50))


@pytest.mark.parametrize(("reused", "smaller"), [(33, False), (32, True)])
def test_a_shorter_reuse_within_whole_blocks_is_no_loss(reused: int, smaller: bool) -> None:
    """Of 40 blocks: engines reuse whole blocks of their own and always compute the last one."""
    under_test = LearnedCapacity(1000)
    gone(under_test, 600, 5, reused=reused)
    assert (under_test.blocks < 1000) is smaller


def test_a_scrape_that_says_the_same_keeps_what_was_learned() -> None:
    under_test = LearnedCapacity(1000)
    forgotten(under_test, 3)
    under_test.set_reported(1100)
    assert (under_test.reported, under_test.blocks) == (1100, 1414)


def test_unlearned_capacities_follow_the_reported_ones() -> None:
    under_test = LearnedCapacity(1000)
    under_test.set_reported(1300)
    assert under_test.blocks == 1300


def test_another_cache_starts_anew() -> None:
    under_test = LearnedCapacity(1000)
    forgotten(under_test, 3)
    under_test.set_reported(50_000)
    assert under_test.blocks == 50_000


def test_an_engine_that_caches_nothing_teaches_nothing() -> None:
    under_test = LearnedCapacity(1000)
    under_test.set_reported(0)
    forgotten(under_test, 100)
    kept(under_test, 100, 100)
    assert under_test.blocks == 0
    under_test.set_reported(1000)
    assert under_test.blocks == 1000


def test_outcomes_fade_for_ever() -> None:
    """Weights grow instead of all counts shrinking; the numbers stay small."""
    reuses = ReuseHistogram()
    for _ in range(20_000):
        reuses.add_evicted(8)
    for _ in range(20_000):
        reuses.add_hit(8)
    assert reuses.evicted_from(0) == pytest.approx(0.0, abs=1e-6)
    assert reuses.count_between(8, 9) == pytest.approx(1 / (1 - 1 / 1.003), rel=0.01)
    assert reuses.find_best(0, 20, near=3)[0] == 9
    assert capacity_of(16) == 4


def test_losses_long_ago_are_no_restart() -> None:
    """Some of prefixes asked for just before, among many that had aged: each has a cause of its own."""
    under_test = LearnedCapacity(4000)
    young, old = under_test.least - 1, 30_000
    for _ in range(4):
        assert gone(under_test, young) == [False]
        assert gone(under_test, old, 15) == [False] * 15
    assert gone(under_test, young, 3) == [False, False, True]
