"""The experiment that finds out whether an engine admits by the number."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvproxy.cluster.routing.waiting_lines import urgency_s
from kvproxy.features.priority.priority_trial import GAP_S, PriorityTrial, Verdict


class Request:
    """One of those that wait."""

    def __init__(self, own_s: float, at: float, urgency: float) -> None:
        self.own_s = own_s
        self.at = at
        self.urgency = urgency


#: Which of those that wait is admitted next: the least by this.
Order = Callable[[Request], float]


def play(order: Order, seed: int, *, requests: int = 4000, load: float = 0.95, slots: int = 1) -> PriorityTrial:
    """Return an engine that prefills one request after the other, by `order`, and a router that runs the trial on
    it."""
    rng = random.Random(seed)
    trial = PriorityTrial(random.Random(seed + 1))
    waiting: list[Request] = []
    now, free_at, serving = 0.0, 0.0, None
    mean_s = 0.7 * 0.1 + 0.3 * 1.0
    for _ in range(requests):
        now += rng.expovariate(load / mean_s)
        while serving is not None and free_at <= now:
            trial.first_token(serving, free_at)
            trial.ended(serving)
            serving = min(waiting, key=order, default=None)
            if serving is not None:
                waiting.remove(serving)
                free_at += serving.own_s
        own_s = 0.1 if rng.random() < 0.7 else 1.0
        request = Request(own_s, now, urgency_s(own_s, now))
        if len(waiting) >= 2 and trial.verdict is Verdict.UNKNOWN:
            request.urgency = trial.place(request, request.urgency, now)
        if serving is None:
            serving, free_at = request, now + own_s
        else:
            waiting.append(request)
    return trial


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_that_orders_by_the_number_is_found_out(seed: int) -> None:
    """Some dozens of requests that wait together are enough."""
    trial = play(lambda request: request.urgency, seed)
    assert trial.verdict is Verdict.OBEYS
    assert trial.pairs < 60


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "order",
    [
        pytest.param(lambda request: request.at, id="by arrival"),
        pytest.param(lambda request: request.own_s, id="the short ones first, whatever the router says"),
        pytest.param(lambda request: urgency_s(request.own_s, request.at), id="by the very same rule, on its own"),
        pytest.param(lambda request: -request.at, id="the latest first"),
    ],
)
def test_an_engine_with_an_order_of_its_own_is_found_out(order: Order, seed: int) -> None:
    """The coin does not affect how lengths and arrival change the order."""
    assert play(order, seed, requests=12_000).verdict is Verdict.IGNORES


def test_errors_are_as_rare_as_promised() -> None:
    """Of 200 engines that order by arrival at most a few are taken for such as obey."""
    verdicts = [play(lambda request: request.at, seed, requests=1500).verdict for seed in range(200)]
    assert verdicts.count(Verdict.OBEYS) <= 6
    assert verdicts.count(Verdict.IGNORES) >= 150


def test_where_next_to_nothing_waits_nothing_is_concluded() -> None:
    """Order shows in what waits alone."""
    trial = play(lambda request: request.at, 1, load=0.2)
    assert trial.verdict is Verdict.UNKNOWN


def pair_of(second_at: float = 0.0) -> PriorityTrial:
    """Two that wait together, the second one placed at that time."""
    trial = PriorityTrial(random.Random(1))
    trial.place("first", 10.0, 0.0)
    trial.place("second", 10.5, second_at)
    return trial


def test_only_the_second_of_a_pair_is_moved() -> None:
    """By the gap before or behind the first, and one pair at a time."""
    trial = PriorityTrial(random.Random(1))
    assert trial.place("first", 10.0, 0.0) == 10.0
    assert trial.place("second", 17.0, 0.0) in (10.0 - GAP_S, 10.0 + GAP_S)
    assert trial.place("third", 12.0, 0.0) == 12.0


def test_a_pair_that_hardly_waited_does_not_count() -> None:
    """Without others served meanwhile the first may have been at work already."""
    trial = pair_of()
    trial.first_token("other", 1.0)
    trial.first_token("first", 2.0)
    trial.first_token("second", 3.0)
    assert trial.pairs == 0


def test_milliseconds_of_waiting_do_not_count() -> None:
    """A request may spend them before it reaches the engine's scheduler, where no number is looked at."""
    trial = pair_of(second_at=1.0)
    for other in range(9):
        trial.first_token(other, 1.0 + other / 1000)
    trial.first_token("first", 1.05)
    trial.first_token("second", 1.06)
    assert trial.pairs == 0


def test_one_step_tells_no_order() -> None:
    """First tokens of one step leave the engine together."""
    trial = pair_of()
    trial.first_token("other", 1.0)
    trial.first_token("another", 1.5)
    trial.first_token("first", 2.0)
    trial.first_token("second", 2.001)
    assert trial.pairs == 0


@pytest.mark.parametrize("leaves", ["first", "second"])
def test_a_client_that_leaves_ends_the_pair(leaves: str) -> None:
    """And the next two may begin."""
    trial = pair_of()
    trial.ended(leaves)
    assert trial.place("third", 11.0, 0.0) == 11.0
    assert trial.place("fourth", 15.0, 0.0) in (11.0 - GAP_S, 11.0 + GAP_S)


def test_a_pair_counts_although_the_one_that_came_first_is_over() -> None:
    """A short answer is complete before the other one begins."""
    trial = PriorityTrial(random.Random(1))
    trial.place("first", 10.0, 0.0)
    ahead = trial.place("second", 10.5, 0.0) < 10.0
    trial.first_token("other", 1.0)
    trial.first_token("another", 1.5)
    trial.first_token("first", 2.0)
    trial.ended("first")
    trial.first_token("second", 3.0)
    assert (trial.pairs, trial.in_order) == (1, 0 if ahead else 1)
