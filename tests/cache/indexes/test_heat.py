"""Requests counted by block on the runs of the approximate index."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.heat import Heat
from tests.cache.indexes.support import A, B, chained

SYSTEM = tuple(range(100, 110))
PATHS = ((1, 2, 3), (1, 2, 4), (1, 5, 6), (7, 8, 9))


def index_of(endpoints: int, *, capacity_blocks: int = 10_000) -> ApproximateIndex:
    return ApproximateIndex(capacity_blocks=capacity_blocks, heat=Heat(endpoints=endpoints))


def ask(index: ApproximateIndex, path: Sequence[int], endpoint: str = A) -> None:
    """One request that is served."""
    index.confirm(index.route(A if endpoint == A else B, index.locate(chained(path))))


def hot(index: ApproximateIndex, path: Sequence[int]) -> int:
    """Hot blocks by what was asked for so far."""
    cursor = index.locate(chained(path))
    cursor.counted = True
    return index.hot_blocks(cursor)


def test_a_shared_system_prompt_becomes_hot() -> None:
    """Two requests an endpoint within the window; what follows it in each session stays cold."""
    index = index_of(2)
    for session in range(5):
        assert hot(index, SYSTEM) == 0
        ask(index, (*SYSTEM, session, session))
    assert hot(index, (*SYSTEM, 0, 0)) == 10
    assert hot(index, (*SYSTEM[:4], 7)) == 4


def test_heat_decays_with_requests() -> None:
    """Prefixes without requests for a while are no longer worth replicas."""
    index = index_of(1)
    for _ in range(3):
        ask(index, SYSTEM)
    assert hot(index, SYSTEM) == 10
    for other in range(64):
        ask(index, (other,))
    assert hot(index, SYSTEM) == 0


def test_more_endpoints_need_more_requests() -> None:
    """The threshold follows the fleet."""
    index = index_of(1)
    for _ in range(4):
        ask(index, SYSTEM)
    assert hot(index, SYSTEM) == 10
    index.heat.endpoints = 4
    assert hot(index, SYSTEM) == 0


@pytest.mark.parametrize(("endpoints", "requests"), [(1, 2), (4, 8), (6, 8), (8, 8), (16, 16)])
def test_eight_requests_are_enough_until_endpoints_are_more(endpoints: int, requests: int) -> None:
    """Fewer than eight tell a shared prefix from a busy session too badly."""
    assert Heat(endpoints=endpoints).threshold == requests


def test_a_request_counts_itself_before_it_is_routed() -> None:
    """The one that makes its prompt hot is placed as one for a hot prompt."""
    index = index_of(1)
    for _ in range(2):
        ask(index, SYSTEM)
    cursor = index.locate(chained(SYSTEM))
    assert (index.hot_blocks(cursor), hot(index, SYSTEM)) == (10, 0)
    index.confirm(index.route(A, cursor))
    assert (index.hot_blocks(cursor), hot(index, SYSTEM)) == (10, 10)


def test_a_retried_request_counts_once() -> None:
    """However many endpoints it was routed to, its cursor is one request."""
    index = index_of(1)
    index.insert(B, index.locate(chained(SYSTEM)))
    for _ in range(2):
        cursor = index.locate(chained(SYSTEM))
        for endpoint in (A, B, A):
            index.rollback(index.route(endpoint, cursor))
        index.confirm(index.route(A, cursor))
    assert hot(index, SYSTEM) == 0
    ask(index, SYSTEM)
    assert hot(index, SYSTEM) == 10


def test_a_request_that_was_never_routed_does_not_count() -> None:
    """To look a prompt up changes nothing."""
    index = index_of(1)
    for _ in range(9):
        hot(index, SYSTEM)
    ask(index, SYSTEM)
    assert index.counts.requests(index.counts.all_runs()[0]) == 1.0


def test_prompts_held_by_no_endpoint_are_cold() -> None:
    """Heat lives on the blocks: evicted by all, failed everywhere, or gone with the last endpoint, they are cold."""
    index = index_of(1, capacity_blocks=10)
    for _ in range(4):
        ask(index, SYSTEM)
    run = index.counts.all_runs()[0]
    ask(index, range(10))
    assert (hot(index, SYSTEM), index.counts.requests(run)) == (0, 0.0)
    for _ in range(4):
        ask(index, SYSTEM, B)
    assert hot(index, SYSTEM) == 10
    index.remove(B)
    assert hot(index, SYSTEM) == 0


def test_a_contradicted_prompt_begins_again() -> None:
    """A prompt whose end the only holder had lost counts from the request that computed it once more."""
    index = index_of(1)
    for _ in range(4):
        ask(index, SYSTEM)
    entry = index.route(A, index.locate(chained(SYSTEM)))
    index.contradict(A, entry.cursor, 4)
    index.confirm(entry)
    assert hot(index, SYSTEM) == 0
    assert min(index.counts.requests(run) for run in index.counts.all_runs()) == 1.0


def test_a_chat_that_grew_is_as_hot_as_its_last_turn() -> None:
    """Its first turns were asked for with every later one, by itself alone; a branch in the middle of it keeps that."""
    index = index_of(1)
    for turn in range(1, 11):
        ask(index, range(5 * turn))
    assert index.counts.runs == 1
    assert hot(index, range(50)) == 0
    for branch in (98, 99):
        ask(index, (*range(17), branch))
    assert hot(index, (*range(17), 97)) == 17


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([A, B])), max_size=60), st.integers(1, 3))
def test_hot_prefixes_are_those_of_a_count_by_block(requests: list[tuple[int, str]], endpoints: int) -> None:
    """Of prompts that do not grow runs are an economy, not an approximation, however they are split."""
    index = index_of(endpoints)
    asked = [PATHS[path] for path, _ in requests]
    for path, endpoint in requests:
        ask(index, PATHS[path], endpoint)
    for request in asked:
        depth, heat = 0, 0.0
        while depth < len(request):
            prefix = request[: depth + 1]
            ages = [len(asked) - i - 1 for i, other in enumerate(asked) if other[: depth + 1] == prefix]
            heat = sum(exp(-age / (64 * endpoints)) for age in ages)
            if heat < 2 * endpoints - 1e-9:
                break
            depth += 1
        if depth == len(request) or abs(heat - 2 * endpoints) > 1e-6:
            assert hot(index, request) == depth
