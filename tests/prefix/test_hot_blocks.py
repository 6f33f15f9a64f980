from __future__ import annotations

from math import exp

from hypothesis import given
from hypothesis import strategies as st

from kvproxy.prefix.hot_blocks import HotBlocks
from tests.prefix.support import chained

SYSTEM = tuple(range(100, 110))


def test_a_shared_system_prompt_becomes_hot() -> None:
    """Two touches an endpoint within the window; what follows it in each session stays cold."""
    hot = HotBlocks(endpoints=2)
    for session in range(5):
        assert hot.hot_prefix_blocks(chained(SYSTEM)) == (10 if session == 5 else 0)
        hot.touch(chained((*SYSTEM, session, session)))
    assert hot.hot_prefix_blocks(chained((*SYSTEM, 0, 0))) == 10
    assert hot.hot_prefix_blocks(chained((*SYSTEM[:4], 7))) == 4


def test_heat_decays_with_requests() -> None:
    """What nobody asked for in a while is no longer worth replicas."""
    hot = HotBlocks(endpoints=1)
    for _ in range(3):
        hot.touch(chained(SYSTEM))
    for other in range(64):
        hot.touch(chained((other,)))
    assert hot.hot_prefix_blocks(chained(SYSTEM)) == 0


def test_more_endpoints_need_more_touches() -> None:
    """The threshold follows the fleet."""
    hot = HotBlocks(endpoints=1)
    for _ in range(4):
        hot.touch(chained(SYSTEM))
    assert hot.hot_prefix_blocks(chained(SYSTEM)) == 10
    hot.endpoints = 4
    assert hot.hot_prefix_blocks(chained(SYSTEM)) == 0


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=60), st.integers(1, 3))
def test_hot_prefixes_are_those_of_a_count_by_block(requests: list[list[int]], endpoints: int) -> None:
    """Runs are an economy, not an approximation."""
    hot = HotBlocks(endpoints=endpoints)
    for request in requests:
        hot.touch(chained(request))
    for request in requests:
        depth = 0
        while depth < len(request):
            prefix = request[: depth + 1]
            ages = [len(requests) - i - 1 for i, other in enumerate(requests) if other[: depth + 1] == prefix]
            heat = sum(exp(-age / (64 * endpoints)) for age in ages)
            if heat < 2 * endpoints - 1e-9:
                break
            depth += 1
        if depth == len(request) or abs(heat - 2 * endpoints) > 1e-6:
            assert hot.hot_prefix_blocks(chained(request)) == depth


def test_the_bounds_hold_and_the_shared_prefix_survives() -> None:
    """What is asked for again and again outlives a flood of prompts seen once."""
    hot = HotBlocks(endpoints=1, max_blocks=200, max_runs=30)
    for session in range(500):
        hot.touch(chained((*SYSTEM, 1000 + session, session, session)))
        assert hot.blocks <= 200
        assert hot.runs <= 30
    assert hot.hot_prefix_blocks(chained(SYSTEM)) == 10


def test_without_room_nothing_new_is_kept() -> None:
    """A prompt larger than the bound, or a branch where every run is taken, passes by."""
    hot = HotBlocks(endpoints=1, max_blocks=8, max_runs=1)
    hot.touch(chained(SYSTEM))
    assert (hot.blocks, hot.runs) == (0, 0)
    hot.touch(chained(SYSTEM[:8]))
    hot.touch(chained((*SYSTEM[:4], 1)))
    assert (hot.blocks, hot.runs) == (8, 1)
