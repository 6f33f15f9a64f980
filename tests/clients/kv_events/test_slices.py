"""Bursts are taken in bounded slices that mean the same."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.clients.kv_events import events as wire
from kvproxy.clients.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Effort, KvEvent


def sliced(events: Iterable[KvEvent | Effort], size: int) -> list[list[KvEvent]]:
    """The slices alone."""
    return [piece for piece, _ in wire.sliced(events, size)]


def run(*hashes: int, parent: int | None = None, extra: bool = False) -> BlockStored:
    keys = tuple((number,) for number in hashes) if extra else None
    return BlockStored(hashes, parent, array("I", [h for h in hashes for _ in range(2)]), 2, extra=keys)


def test_events_are_grouped_up_to_the_bound() -> None:
    """Order is kept; small events share a slice; one without blocks costs one."""
    events: list[KvEvent] = [run(1, 2), BlockRemoved((3,)), AllBlocksCleared(), run(4)]
    assert list(sliced(events, 4)) == [events[:3], events[3:]]
    assert list(sliced([], 4)) == []


def test_effort_fills_slices_as_blocks_do() -> None:
    """A follower may pause after each, with events in it or without."""
    steps: list[KvEvent | Effort] = [Effort(), Effort(), run(1), Effort(9), Effort(), run(2)]
    assert [*wire.sliced(steps, 4)] == [([run(1)], 12), ([run(2)], 2)]
    assert [*wire.sliced([Effort()] * 10, 4)] == [([], 4), ([], 4), ([], 2)]


def test_a_long_run_is_cut_into_a_chain() -> None:
    """Each piece's parent is the block before it; tokens and extra keys go with their blocks."""
    ((first,), (second,), (third,)) = sliced([run(1, 2, 3, 4, 5, parent=9, extra=True)], 2)
    assert first == run(1, 2, parent=9, extra=True)
    assert second == run(3, 4, parent=2, extra=True)
    assert third == run(5, parent=4, extra=True)


def test_a_long_removal_is_cut() -> None:
    """Blocks leave one by one anyway."""
    assert list(sliced([BlockRemoved((1, 2, 3))], 2)) == [[BlockRemoved((1, 2))], [BlockRemoved((3,))]]


def test_a_run_whose_tokens_do_not_fit_stays_whole() -> None:
    """It is not known which tokens belong to which of its blocks."""
    odd = BlockStored((1, 2, 3), None, array("I", [1]), 2)
    assert list(sliced([odd], 2)) == [[odd]]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(min_value=0, max_value=9)), st.integers(min_value=1, max_value=5))
def test_nothing_is_lost_or_reordered(lengths: list[int], size: int) -> None:
    """The blocks of all slices are the blocks of all events."""
    counter = iter(range(1000))
    events = [run(*(next(counter) for _ in range(length))) for length in lengths]
    slices = list(sliced(events, size))
    assert [h for piece in slices for event in piece for h in event.block_hashes] == [  # type: ignore[union-attr]
        h for event in events for h in event.block_hashes
    ]
    assert all(sum(event.blocks for event in piece) <= size for piece in slices)
