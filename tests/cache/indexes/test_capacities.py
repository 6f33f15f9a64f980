"""Capacities learned from a simulated engine's block cache, as chats with pauses of all lengths come back to it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, islice
from random import Random

import pytest

from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.capacity import Capacities
from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine_io import BlockStored
from tests.cache.indexes.support import A, B, chained

TRUE_CAPACITY = 1200
REQUESTS = 4000
#: A system prompt all chats begin with.
SYSTEM = 6


def prompts(rng: Random) -> Iterator[array[int]]:
    """Yield the turns of chats that come and go: each adds some blocks, and comes back after a pause between moments
    and much longer than the cache remembers."""
    system = array("Q", (rng.getrandbits(64) for _ in range(SYSTEM)))
    waiting: list[tuple[float, int, array[int]]] = []  # when a chat comes next, a number, what was said
    for now in count():
        heappush(waiting, (now, now, system))
        while waiting and waiting[0][0] <= now:
            _, number, said = heappop(waiting)
            turn = said + array("Q", (rng.getrandbits(64) for _ in range(rng.randint(2, 8))))
            yield turn
            if len(turn) < 90:
                heappush(waiting, (now + rng.lognormvariate(4.0, 1.5) + 1.0, number, turn))


class Engine:
    """A block cache that serves one request at a time."""

    def __init__(self, capacity: int = TRUE_CAPACITY) -> None:
        self.cache = BlockCache(capacity, record_events=False)

    def serve(self, prompt: array[int]) -> int:
        """Leading blocks that were reused."""
        reused = self.cache.match_prefix(prompt, len(prompt) - 1)
        held = self.cache.acquire(prompt, reused)
        fresh = self.cache.allocate(len(prompt) - reused)
        self.cache.store(fresh, BlockStored(tuple(prompt[reused:]), None))
        self.cache.release([*held, *fresh])
        return reused


def play(
    reported: float,
    *,
    requests: int = REQUESTS,
    lost_share: float = 0.0,
    restart_every: int = 0,
    foreign: bool = False,
    learning: bool = True,
) -> list[float]:
    """Return the believed capacity against the true one, after each request."""
    rng, engine = Random(3), Engine()
    index = ApproximateIndex(capacity_blocks=int(reported * TRUE_CAPACITY))
    capacities = Capacities(index, learning=learning)
    strangers = prompts(Random(4))
    found = []
    for number, prompt in enumerate(islice(prompts(Random(5)), requests)):
        if restart_every and number % restart_every == restart_every - 1:
            engine = Engine()
        if foreign:
            engine.serve(next(strangers))
        claim = index.route(A, index.locate(prompt))
        reused = engine.serve(prompt)
        if rng.random() < lost_share:
            reused = min(reused, SYSTEM)
        known = len(prompt) - claim.new_blocks
        lost = capacities.observe_reuse(claim, reused)
        if reused < known:
            index.contradict(A, claim.cursor, reused)
        index.confirm(claim)
        if lost:
            index.insert(A, index.locate(prompt))
        found.append(index.counts.capacity(A) / TRUE_CAPACITY)
    return found


def settled(found: list[float]) -> float:
    """Typical for the last third."""
    last = sorted(found[len(found) * 2 // 3 :])
    return last[len(last) // 2]


@pytest.mark.parametrize("reported", [0.25, 4.0])
def test_a_capacity_wrong_by_four_is_found(reported: float) -> None:
    """Either way, to within a third, in a few thousand requests, and it stays there."""
    found = play(reported)
    assert 1 / 1.3 <= settled(found) <= 1.3
    assert all(1 / 1.5 <= each <= 1.5 for each in found[REQUESTS // 2 :])


def test_a_right_capacity_stays() -> None:
    assert all(1 / 1.3 <= each <= 1.3 for each in play(1.0))


@pytest.mark.parametrize("reported", [0.25, 1.0, 4.0])
def test_losses_of_other_causes_do_not_mislead(reported: float) -> None:
    """Every tenth request finds the system prompt alone, whatever the cache holds."""
    assert 1 / 1.4 <= settled(play(reported, lost_share=0.1)) <= 1.4


@pytest.mark.parametrize("reported", [0.25, 1.0, 4.0])
def test_restarts_do_not_mislead(reported: float) -> None:
    """Four of them: each time everything is gone at once."""
    assert 1 / 1.4 <= settled(play(reported, restart_every=REQUESTS // 5)) <= 1.4


def test_capacity_used_by_others_is_not_there_for_us() -> None:
    """As much traffic again from other clients: what we route may count on half."""
    assert 0.5 / 1.4 <= settled(play(1.0, foreign=True)) <= 0.5 * 1.4


def test_without_learning_it_stays_as_reported() -> None:
    assert set(play(4.0, requests=500, learning=False)) == {4.0}


def test_a_restart_empties_the_index_at_once() -> None:
    """Instead of one misrouted request for every prefix it believed in."""
    index = ApproximateIndex(capacity_blocks=TRUE_CAPACITY)
    capacities = Capacities(index)
    chats = [chained([number] * 10) for number in range(40)]
    for chat in chats:
        index.insert(A, index.locate(chat))
    said = []
    for chat in reversed(chats):
        claim = index.route(A, index.locate(chat))
        said.append(capacities.observe_reuse(claim, 0))
        index.confirm(claim)
    assert said.count(True) == 1
    assert index.counts.held_blocks(A) == 10 * (39 - said.index(True))


def test_claims_from_before_a_loss_say_nothing() -> None:
    index = ApproximateIndex(capacity_blocks=TRUE_CAPACITY)
    capacities = Capacities(index)
    index.insert(A, index.locate(chained(range(40))))
    late = [index.route(A, index.locate(chained(range(40)))) for _ in range(20)]
    index.clear(A)
    assert not any(capacities.observe_reuse(claim, 0) for claim in late)


def test_reported_and_learned_capacities_are_shown_and_forgotten() -> None:
    index = ApproximateIndex(capacity_blocks=1000)
    capacities = Capacities(index)
    assert capacities.reported_blocks(A) == 1000
    capacities.set_reported(A, 3000)
    capacities.set_reported(B, 0)
    assert (capacities.reported_blocks(A), index.counts.capacity(A), index.counts.capacity(B)) == (3000, 3000, 0)
    for _ in range(2):
        capacities.forget_endpoint(A)
        index.remove(A)
    assert capacities.reported_blocks(A) == 1000
