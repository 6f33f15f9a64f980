"""The paged prefix cache: what is held, what is evicted, what is announced."""

from __future__ import annotations

import random

import pytest

from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored


def hold(cache: BlockCache, hashes: list[int]) -> list[int]:
    """Compute and store a whole prompt that was not there, and return its blocks, in use."""
    blocks = cache.allocate(len(hashes))
    cache.store(blocks, BlockStored(tuple(hashes), None))
    return blocks


def test_match_is_the_longest_contiguous_prefix() -> None:
    """A hole ends the match, whatever is held behind it."""
    cache = BlockCache(8)
    hold(cache, [1, 2, 4])
    assert cache.match_prefix([1, 2, 3, 4], 4) == 2
    assert cache.match_prefix([2, 1], 2) == 2
    assert cache.match_prefix([9], 1) == 0


def test_match_respects_its_limit_and_the_end_of_the_prompt() -> None:
    """No more than `limit` blocks are reported, and no more than were asked for."""
    cache = BlockCache(8)
    hold(cache, [1, 2, 3])
    assert cache.match_prefix([1, 2, 3], 2) == 2
    assert cache.match_prefix([1], 5) == 1


def test_usage_counts_running_blocks_only() -> None:
    """An idle engine reports 0 although its prefix cache is full."""
    cache = BlockCache(4)
    blocks = hold(cache, [1, 2])
    assert cache.usage == 0.5
    cache.release(blocks)
    assert cache.usage == 0.0
    assert cache.match_prefix([1, 2], 2) == 2


def test_tail_of_the_oldest_request_goes_first() -> None:
    """Least recently used first, and within a sequence its end before its beginning."""
    cache = BlockCache(4)
    cache.release(hold(cache, [1, 2]))
    cache.release(hold(cache, [11, 12]))
    cache.take_events()
    cache.allocate(3)
    assert cache.take_events() == [BlockRemoved(2), BlockRemoved(1), BlockRemoved(12)]
    assert 11 in cache


def test_memory_that_holds_nothing_is_used_before_anything_is_evicted() -> None:
    """A partial block that was freed is taken first."""
    cache = BlockCache(3)
    cache.release(hold(cache, [1, 2]))
    cache.release(cache.allocate(1))
    cache.take_events()
    cache.allocate(1)
    assert cache.take_events() == []


def test_a_hit_protects_blocks_until_their_last_user_left() -> None:
    """Two users of one prefix: it returns to the free list when the second one is done."""
    cache = BlockCache(4)
    first = hold(cache, [1, 2])
    second = cache.acquire([1, 2], 2)
    assert second == first
    cache.release(first)
    assert cache.free_blocks == 2
    cache.release(second)
    assert cache.free_blocks == 4
    assert cache.count_idle([1, 2], 2) == 2


def test_evicting_one_of_two_copies_is_announced_while_the_other_serves() -> None:
    """vLLM's double copy of a recomputed last block: a removal event, and yet the next request hits."""
    cache = BlockCache(3)
    first = hold(cache, [1])
    second = hold(cache, [1])
    cache.release(first)
    cache.take_events()
    cache.allocate(2)
    assert cache.take_events() == [BlockRemoved(1)]
    assert cache.acquire([1], 1) == second


def test_the_spare_copy_may_go_first_too() -> None:
    """Evicting the copy that is not the one found by lookups leaves the lookup as it was."""
    cache = BlockCache(2)
    first = hold(cache, [1])
    cache.release(hold(cache, [1]))
    cache.allocate(1)
    assert 1 in cache
    assert cache.acquire([1], 1) == first


def test_clear_forgets_everything_and_says_so_once() -> None:
    """A reset is one event, not a removal a block."""
    cache = BlockCache(4)
    cache.release(hold(cache, [1, 2]))
    cache.take_events()
    assert cache.clear()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.match_prefix([1], 1) == 0
    cache.allocate(4)
    assert cache.take_events() == []


def test_clear_is_refused_while_something_runs() -> None:
    """Blocks in use cannot be forgotten."""
    cache = BlockCache(4)
    hold(cache, [1])
    assert not cache.clear()
    assert 1 in cache


def test_without_events_nothing_piles_up() -> None:
    """A cache without a listener keeps no history."""
    cache = BlockCache(2, record_events=False)
    cache.release(hold(cache, [1, 2]))
    cache.allocate(2)
    assert cache.take_events() == []


def test_a_cache_needs_a_block() -> None:
    """Zero blocks is a configuration error."""
    with pytest.raises(ValueError, match="at least one block"):
        BlockCache(0)


def test_events_replay_to_what_is_held() -> None:
    """Over random traffic: stores minus removals, counted, is exactly the content of the cache."""
    rng = random.Random(7)
    cache = BlockCache(32)
    counts: dict[int, int] = {}
    running: list[list[int]] = []
    for _ in range(2000):
        prompt = [rng.randrange(4) * 100 + depth for depth in range(rng.randrange(1, 9))]
        hits = cache.match_prefix(prompt, len(prompt) - 1)
        if len(prompt) - hits + cache.count_idle(prompt, hits) <= cache.free_blocks:
            blocks = cache.acquire(prompt, hits)
            fresh = cache.allocate(len(prompt) - hits)
            cache.store(fresh, BlockStored(tuple(prompt[hits:]), prompt[hits - 1] if hits else None))
            running.append(blocks + fresh)
        elif running:
            cache.release(running.pop(rng.randrange(len(running))))
        for event in cache.take_events():
            if isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    counts[block_hash] = counts.get(block_hash, 0) + 1
            elif isinstance(event, BlockRemoved):
                counts[event.block_hash] -= 1
        assert {block_hash for block_hash, count in counts.items() if count} == {h for h in counts if h in cache}
