"""A cache several engines share: lent blocks come back."""

from __future__ import annotations

from kvproxy.lab.replay.pooled import PooledCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import EngineSettings, FirstToken, SimRequest


def test_two_plans_for_the_last_block_both_get_one() -> None:
    """The pool lends beyond its capacity and takes back as soon as it can."""
    cache = PooledCache(2)
    first, second = cache.allocate(2), cache.allocate(1)
    assert cache.free_blocks == 0
    cache.release(first)
    assert cache.free_blocks == 1
    cache.release(second)
    assert cache.free_blocks == 2


def test_kv_computed_by_one_engine_is_reused_by_the_other() -> None:
    """That is what makes it a bound."""
    settings = EngineSettings(capacity_blocks=8, block_size=16)
    cache = PooledCache(8)
    one, two = Engine(settings, cache=cache), Engine(settings, cache=cache)
    one.submit(SimRequest("a", (1, 2), 40, 1), 0.0)
    one.advance(10.0)
    two.submit(SimRequest("b", (1, 2), 40, 1), 10.0)
    cached = [output.cached_tokens for output in two.advance(20.0) if isinstance(output, FirstToken)]
    assert cached == [32]
