"""Which data-parallel ranks of an engine requests may ask for, and by which numbers."""

from __future__ import annotations

import pytest

from kvproxy.cluster.ranks import DOUBTS, MAX_RANKS, RankRefusal, Ranks
from kvproxy.cluster.settings import DataParallelSettings

AUTO, OFF = DataParallelSettings(), DataParallelSettings(steer=False)


def stated(*ranks: int) -> Ranks:
    return Ranks(DataParallelSettings(ranks=ranks))


def test_ranks_are_known_where_two_sources_agree() -> None:
    """Metrics show what an engine has, its event sources how these are called: either alone is not enough."""
    ranks = Ranks(AUTO)
    assert (ranks.candidates, ranks.unknown) == ((), False)
    for named in (None, (), (0,), (0, 1, 2), (1, 2)):
        ranks.observe_sources((1, 0), named)
        assert (ranks.candidates, ranks.unknown) == ((), True)
    ranks.observe_sources((1, 0), {1, 0})
    assert (ranks.candidates, ranks.unknown) == ((0, 1), False)


@pytest.mark.parametrize("shown", [(), (3,)])
def test_an_engine_with_one_rank_is_one_candidate(shown: tuple[int, ...]) -> None:
    """So is each server of external balancing, and an engine that came back without ranks."""
    ranks = Ranks(AUTO)
    ranks.observe_sources((0, 1), (0, 1))
    ranks.observe_sources(shown, shown)
    assert (ranks.candidates, ranks.unknown) == ((), False)


def test_the_configuration_comes_first() -> None:
    """Whatever metrics show; and with `steer: false` there is nothing to find out."""
    ranks = stated(5, 4)
    ranks.observe_sources((0, 1), (0, 1))
    assert (ranks.candidates, ranks.unknown, ranks.asks) == ((4, 5), False, False)
    off = Ranks(OFF)
    off.observe_sources((0, 1), (0, 1))
    assert (off.candidates, off.unknown, off.asks) == ((), False, False)


def test_a_refused_rank_is_no_candidate_until_the_engine_restarts() -> None:
    """Or is configured otherwise. Where no rank is left the engine is one candidate."""
    ranks = stated(0, 1, 2)
    assert ranks.record_refusal(2, 2) is RankRefusal.DROPPED
    assert (ranks.candidates, ranks.refused) == ((0, 1), (2,))
    assert ranks.record_refusal(0, 0) is RankRefusal.DROPPED
    assert ranks.record_refusal(1, 1) is RankRefusal.DROPPED
    assert ranks.candidates == ()
    ranks.forget_refusals()
    assert ranks.candidates == (0, 1, 2)
    ranks.record_refusal(2, 2)
    ranks.configure(DataParallelSettings(ranks=(0, 1, 2)))
    assert ranks.candidates == (0, 1)
    ranks.configure(DataParallelSettings(ranks=(0, 1, 2, 3)))
    assert ranks.candidates == (0, 1, 2, 3)


def test_a_front_end_may_count_its_own_ranks_from_0() -> None:
    """vLLM's in Python does under hybrid balancing: its second server knows 4 to 7 as 0 to 3. A rank is only dropped
    where both numbers were refused."""
    ranks = stated(4, 5, 6, 7)
    assert ranks.number(5) == 5
    assert ranks.record_refusal(5, 5) is RankRefusal.RENUMBERED
    assert ranks.candidates == (4, 5, 6, 7)
    assert [ranks.number(rank) for rank in ranks.candidates] == [0, 1, 2, 3]
    assert ranks.record_refusal(6, 6) is RankRefusal.LATE  # it was sent before
    assert ranks.record_refusal(4, 0) is RankRefusal.DROPPED
    assert [ranks.number(rank) for rank in ranks.candidates] == [1, 2, 3]
    assert ranks.record_refusal(4, 0) is RankRefusal.LATE


def test_a_refusal_that_does_not_name_the_rank_is_doubted() -> None:
    """Twice; a restart begins to count again."""
    ranks = stated(0, 1)
    for _ in range(2):
        assert [ranks.record_refusal(1, 1, named=False) for _ in range(DOUBTS - 1)] == [RankRefusal.DOUBTED] * (
            DOUBTS - 1
        )
        assert ranks.candidates == (0, 1)
        ranks.forget_refusals()
    for expected in [RankRefusal.DOUBTED] * (DOUBTS - 1) + [RankRefusal.DROPPED]:
        assert ranks.record_refusal(1, 1, named=False) is expected
    assert ranks.candidates == (0,)


def test_ranks_that_were_found_anew_have_not_been_refused() -> None:
    """An engine that grew from two ranks to three knows the third."""
    ranks = Ranks(AUTO)
    ranks.observe_sources((0, 1), (0, 1))
    ranks.record_refusal(1, 1)
    ranks.observe_sources((0, 1), (0, 1))
    assert ranks.candidates == (0,)
    ranks.observe_sources((0, 1, 2), (0, 1, 2))
    assert ranks.candidates == (0, 1, 2)


def test_ranks_of_an_earlier_life_count_until_the_engine_was_asked() -> None:
    """Unless the configuration says which there are."""
    ranks = Ranks(AUTO)
    ranks.resume_ranks((1, 0))
    assert ranks.candidates == (0, 1)
    ranks.observe_sources((), None)
    assert ranks.candidates == ()
    known = stated(7)
    known.resume_ranks((0, 1))
    assert known.candidates == (7,)


def test_the_number_of_ranks_is_bounded() -> None:
    """An engine cannot make more endpoints than a server has ranks."""
    ranks = Ranks(AUTO)
    ranks.observe_sources(range(10_000), range(MAX_RANKS))
    assert len(ranks.candidates) == MAX_RANKS
