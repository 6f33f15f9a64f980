"""Policies that look at weights and requests in flight alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import Candidate, PickRequest, Policy
from kvproxy.cluster.routing.simple import LeastRequest, PowerOfTwo, RandomPolicy, RoundRobin
from tests.cluster.routing.fleet import FakeCandidate, fleet, occupy, place

REQUEST = PickRequest()


class Drawn(random.Random):
    """Draws a given sequence of numbers from 0 to 1."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0)


def weighted(*weights: float) -> list[FakeCandidate]:
    return [FakeCandidate(EndpointId(f"e{i}"), weight) for i, weight in enumerate(weights)]


def busy(*in_flight: int) -> list[FakeCandidate]:
    candidates = fleet(len(in_flight))
    for candidate, times in zip(candidates, in_flight, strict=True):
        occupy(candidate, times=times)
    return candidates


def turns(policy: Policy, candidates: Sequence[Candidate], count: int) -> str:
    return "".join(str(place(policy, REQUEST, candidates).index) for _ in range(count))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1,), "0000"),
        ((1, 1), "010101"),
        ((1, 1, 1), "012012"),
        ((2, 1), "010010"),
        ((5, 1, 1), "0010200"),
        ((1, 3), "1011"),
        ((0.5, 0.25), "010010"),
    ],
)
def test_round_robin_spreads_each_ones_turns(weights: tuple[float, ...], expected: str) -> None:
    """A heavy endpoint's turns come between the others', never in one run."""
    assert turns(RoundRobin(rng=random.Random(1)), weighted(*weights), 2 * len(expected)) == 2 * expected


def test_round_robin_keeps_its_shares_when_some_are_screened_out() -> None:
    """Requests that exclude an endpoint do not cost it its turns in the others."""
    policy, candidates = RoundRobin(rng=random.Random(1)), weighted(1, 1, 1)
    chosen = Counter[str]()
    for _ in range(300):
        place(policy, REQUEST, candidates[1:])
        chosen[candidates[place(policy, REQUEST, candidates).index].id] += 1
    assert chosen["e0"] == 100


def test_round_robin_forgets_endpoints_that_left() -> None:
    """A fleet whose endpoints come and go does not grow its memory, and the remaining ones keep their turns."""
    policy = RoundRobin(rng=random.Random(1))
    for generation in range(500):
        place(policy, REQUEST, [FakeCandidate(EndpointId(f"g{generation}-{i}")) for i in range(3)])
    assert len(policy._earned) < 100
    assert turns(policy, weighted(1, 1), 4) in ("0101", "1010")


@pytest.mark.parametrize(
    ("drawn", "expected"), [(0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999999, 2), (1.0, 2)]
)
def test_random_draws_by_weight(drawn: float, expected: int) -> None:
    """Each endpoint owns its share of the range; what rounding leaves over falls to the last."""
    policy = RandomPolicy(rng=Drawn(drawn))
    assert policy.choose(REQUEST, weighted(1, 2, 1), 0.0).index == expected


@pytest.mark.parametrize(
    ("in_flight", "weights", "expected"),
    [
        ((3, 1, 2), (1, 1, 1), 1),
        ((0, 0, 1), (1, 1, 1), 0),
        ((3, 1), (4, 1), 0),  # 4/4 against 2/1
        ((1, 0), (1, 0.25), 0),  # 2/1 against 1/0.25
    ],
)
def test_least_request_counts_this_request_in_and_weighs(
    in_flight: tuple[int, ...], weights: tuple[float, ...], expected: int
) -> None:
    """The least (in flight + 1) / weight."""
    candidates = busy(*in_flight)
    for candidate, weight in zip(candidates, weights, strict=True):
        candidate.weight = weight
    assert LeastRequest(rng=Drawn(0.0)).choose(REQUEST, candidates, 0.0).index == expected


@pytest.mark.parametrize(("drawn", "expected"), [(0.0, 0), (0.34, 2), (0.67, 3), (0.999, 3)])
def test_least_request_draws_among_ties(drawn: float, expected: int) -> None:
    """Otherwise every proxy would herd onto the first endpoint of its list."""
    assert LeastRequest(rng=Drawn(drawn)).choose(REQUEST, busy(0, 5, 0, 0), 0.0).index == expected


@pytest.mark.parametrize(
    ("draws", "in_flight", "expected"),
    [
        ((0.0, 0.0), (9, 1, 0), 1),  # first 0, second the first of the rest
        ((0.0, 0.99), (9, 1, 0), 2),
        ((0.99, 0.0), (0, 1, 9), 0),
        ((0.5, 0.5), (5, 1, 0), 2),  # first 1, second 2
        ((0.99, 0.99), (0, 7, 7), 2),  # equal: the first drawn
    ],
)
def test_power_of_two_takes_the_less_loaded_of_two_different_ones(
    draws: tuple[float, float], in_flight: tuple[int, ...], expected: int
) -> None:
    """The second is never the first again."""
    assert PowerOfTwo(rng=Drawn(*draws)).choose(REQUEST, busy(*in_flight), 0.0).index == expected


def test_power_of_two_weighs() -> None:
    """Twice the weight, twice the requests."""
    candidates = busy(3, 2)
    candidates[0].weight = 2.0
    assert PowerOfTwo(rng=Drawn(0.0, 0.0)).choose(REQUEST, candidates, 0.0).index == 0


def test_power_of_two_of_one() -> None:
    """There is nothing to compare."""
    assert PowerOfTwo(rng=random.Random(1)).choose(REQUEST, busy(7), 0.0).index == 0


@pytest.mark.parametrize("make", [RandomPolicy, LeastRequest, PowerOfTwo])
def test_equal_endpoints_get_equal_shares(make: type[RandomPolicy | LeastRequest | PowerOfTwo]) -> None:
    """3 000 choices over five idle endpoints: no endpoint is more than a quarter off."""
    shares = Counter(turns(make(rng=random.Random(7)), fleet(5), 3000))
    assert all(450 < share < 750 for share in shares.values())
    assert len(shares) == 5
