"""Which block a simulated cache gives up first."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import BlockStored, EngineSettings, FirstToken, SimRequest
from kvproxy.lab.simulator.retention import Eviction, Future, make_ranking
from kvproxy.lab.simulator.timing import EngineTiming

RANKED = [each for each in Eviction if each is not Eviction.OPTIMUM]


def play(cache: BlockCache, prompts: Sequence[Sequence[int]], future: Future | None = None) -> list[int]:
    """Blocks found of each prompt, one prompt after the other."""
    found = []
    for prompt in prompts:
        hits = cache.match_prefix(prompt, len(prompt))
        held = cache.acquire(prompt, hits)
        new = cache.allocate(len(prompt) - hits)
        if new:
            cache.store(new, BlockStored(tuple(prompt[hits:]), prompt[hits - 1] if hits else None))
        if future is not None:
            future.note_prompt(prompt)
        cache.release(held + new)
        found.append(hits)
    return found


def cache_of(eviction: Eviction, blocks: int, prompts: Sequence[Sequence[int]] = ()) -> tuple[BlockCache, Future]:
    future = Future(prompts)
    return BlockCache(blocks, ranking=make_ranking(eviction, blocks, future=future)), future


def test_seldom_used_prefixes_are_evicted_first() -> None:
    """By frequency the system prompt survives a flood of others, which by recency it does not."""
    system, flood = [1, 2], [[10 * each, 10 * each + 1] for each in range(1, 13)]
    prompts = [system, system, system, system, *flood, system]
    for eviction, found in ((Eviction.LRU, 0), (Eviction.LFU, 2)):
        assert play(cache_of(eviction, 12)[0], prompts)[-1] == found


def test_the_latest_next_use_is_evicted_first() -> None:
    """One prompt comes every third time, the others once: it is found though it is the longest unused."""
    regular, once = [1, 2], iter(range(100, 1000))
    prompts = [prompt for _ in range(12) for prompt in (regular, [next(once), next(once)], [next(once), next(once)])]
    assert play(cache_of(Eviction.NEXT_USE, 4)[0], prompts)[-3] == 2
    assert play(cache_of(Eviction.LRU, 4)[0], prompts)[-3] == 0


def test_no_order_finds_more_than_the_one_that_knows_the_future() -> None:
    """On prompts of one block each, where Belady's order is the best there is."""
    rng = Random(5)
    prompts = [[min(int(rng.paretovariate(0.7)), 200)] for _ in range(2000)]
    cache, future = cache_of(Eviction.OPTIMUM, 16, prompts)
    optimum = sum(play(cache, prompts, future))
    for eviction in RANKED:
        assert sum(play(cache_of(eviction, 16)[0], prompts)) <= optimum


@pytest.mark.parametrize("eviction", RANKED)
def test_entries_in_use_are_never_evicted(eviction: Eviction) -> None:
    """Whatever its score; and a cache of which all is in use but a few blocks goes on with those."""
    cache, _ = cache_of(eviction, 6)
    held = cache.allocate(3)
    cache.store(held, BlockStored((1, 2, 3), None))
    play(cache, [[10 * each, 10 * each + 1, 10 * each + 2] for each in range(1, 20)])
    assert cache.match_prefix([1, 2, 3], 3) == 3
    cache.release(held)
    assert cache.free_blocks == 6


def test_the_optimum_needs_the_future() -> None:
    """An engine that serves cannot have it."""
    with pytest.raises(ValueError, match="only kvproxy replay"):
        Engine(EngineSettings(eviction=Eviction.OPTIMUM))


def test_choices_of_one_request_share_its_whole_blocks() -> None:
    """`n` answers are as many sequences, as in vLLM: each block of the prompt is held once, for all of them; the one
    that the prompt does not fill is each one's own, so that nothing has to be copied when they begin to differ."""
    timing = EngineTiming(prefill_tokens_per_s=1e6, quadratic_tokens=1e9)
    engine = Engine(EngineSettings(100, 16, max_batched_tokens=512, timing=timing))
    for choice in range(4):
        engine.submit(SimRequest(f"r-{choice}", (1, 2, 3, 4, 5), 5 * 16 + 8, 20), 0.0)
    outputs = engine.advance(0.02)
    assert [each.cached_tokens for each in outputs if isinstance(each, FirstToken)] == [0, 80, 80, 80]
    assert engine.load.kv_usage == pytest.approx((5 + 4) / 100)
    assert engine.cancel("r-0", 0.02)
    assert engine.load.kv_usage == pytest.approx((5 + 3) / 100)
    engine.advance(100.0)
    assert engine.load.kv_usage == 0
