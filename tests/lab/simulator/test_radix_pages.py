"""The radix tree of pages of a simulated SGLang."""

from __future__ import annotations

import random

import pytest

from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored
from kvproxy.lab.simulator.sglang_radix_pages import RadixPages, hash_pages

SIZE = 2


def hashes(tokens: range) -> list[int]:
    return hash_pages(tokens, SIZE, paired=False)


def run(pages: RadixPages, tokens: range) -> list[int]:
    """Run a sequence that reuses cached pages, computes the rest, and stays; returns its pages."""
    names = hashes(tokens)
    hits = pages.match_prefix(names, len(names))
    held = pages.acquire(names, hits)
    rest = pages.allocate(len(names) - hits)
    parent = names[hits - 1] if hits else None
    if rest:
        pages.store(rest, BlockStored(tuple(names[hits:]), parent, tuple(tokens[hits * SIZE :])))
    return held + rest


def stored(pages: RadixPages) -> list[int]:
    return [name for event in pages.take_events() if isinstance(event, BlockStored) for name in event.block_hashes]


def test_a_page_is_named_by_all_before_it() -> None:
    """Signed, of full pages, apart by namespace; a pair needs the token after it, so a page waits for one more."""
    names = hash_pages(range(100), SIZE, paired=False)
    assert len(set(names)) == 50
    assert min(names) < 0 < max(names)
    assert all(-(1 << 63) <= name < 1 << 63 for name in names)
    assert hash_pages(range(5), SIZE, paired=False) == names[:2]
    assert set(hash_pages(range(5), SIZE, paired=False, namespace="s")).isdisjoint(names)
    assert len(hash_pages(range(4), SIZE, paired=True)) == 1
    assert hash_pages([0, 1, 2, 3], SIZE, paired=True) != hash_pages([0, 1, 9, 3], SIZE, paired=True)


def test_blocks_of_a_finished_sequence_are_reused() -> None:
    """And counts as free then, though it is held."""
    pages = RadixPages(8, page_size=SIZE)
    used = run(pages, range(8))
    assert (pages.free_blocks, pages.usage, len(pages)) == (4, 0.5, 4)
    pages.release(used)
    assert (pages.free_blocks, pages.usage, len(pages)) == (8, 0.0, 4)
    names = hashes(range(8))
    assert (pages.match_prefix(names, 4), pages.match_prefix(names, 2), pages.count_idle(names, 4)) == (4, 2, 4)
    assert names[0] in pages


def test_the_leaf_used_least_of_late_goes_first() -> None:
    """Never a page below which there is one: the tail of what is oldest, page by page."""
    pages = RadixPages(6, page_size=SIZE)
    pages.release(run(pages, range(6)))
    pages.release(run(pages, range(100, 106)))
    pages.release(run(pages, range(6)))  # used again
    pages.take_events()
    pages.allocate(2)
    gone = [event.block_hash for event in pages.take_events() if isinstance(event, BlockRemoved)]
    assert gone == list(reversed(hashes(range(100, 106))))[:2]


def test_blocks_computed_by_two_sequences_are_held_and_announced_once() -> None:
    """The second one's pages are spare when it ends; what both use is not evicted before both have ended."""
    pages = RadixPages(6, page_size=SIZE)
    names = hashes(range(4))
    first, second = pages.allocate(2), pages.allocate(3)
    pages.store(first, BlockStored(tuple(names), None, tuple(range(4))))
    longer = hashes(range(6))
    pages.store(second, BlockStored(tuple(longer), None, tuple(range(6))))
    events = pages.take_events()
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [tuple(names), (longer[2],)]
    assert isinstance(events[1], BlockStored)
    assert (events[1].parent, events[1].token_ids) == (names[-1], (4, 5))
    pages.release(first)
    assert pages.free_blocks == 1
    pages.release(second)
    assert (pages.free_blocks, len(pages)) == (6, 3)
    pages.store([], BlockStored((), None))
    assert not stored(pages)


def test_nothing_is_forgotten_while_a_sequence_runs() -> None:
    """`/flush_cache` says so."""
    pages = RadixPages(4, page_size=SIZE)
    used = run(pages, range(4))
    assert not pages.clear()
    pages.release(used)
    assert pages.clear()
    assert isinstance(pages.take_events()[-1], AllBlocksCleared)
    assert (len(pages), pages.free_blocks) == (0, 4)
    silent = RadixPages(4, page_size=SIZE, record_events=False)
    run(silent, range(4))
    assert not silent.take_events()


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_or_lent_twice(seed: int) -> None:
    """Whatever comes and goes, and subscribers know exactly what is held."""
    rng, pages = random.Random(seed), RadixPages(24, page_size=SIZE)
    running: list[list[int]] = []
    held: set[int] = set()
    for _ in range(400):
        if running and (len(running) > 3 or rng.random() < 0.5):
            pages.release(running.pop(rng.randrange(len(running))))
        elif pages.free_blocks >= 8:
            start = rng.choice((0, 0, 1000))
            running.append(run(pages, range(start, start + 2 * rng.randrange(1, 6) + (rng.random() < 0.3) * 4)))
        for event in pages.take_events():
            if isinstance(event, BlockStored):
                assert held.isdisjoint(event.block_hashes)
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held.remove(event.block_hash)
        assert held == set(pages._nodes)
        used = {page for each in running for page in each}
        assert pages.capacity_blocks - pages.free_blocks == len(used)
    for each in running:
        pages.release(each)
    assert len(pages.allocate(24)) == len(set(range(24)))
