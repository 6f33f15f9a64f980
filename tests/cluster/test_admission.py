"""Requests that wait for room in the engines' memory, by a rule that stands beside the load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from kvproxy.base.errors import QueueFull
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.metrics import RoutingMetrics
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.router_queue import RouterQueue
from kvproxy.cluster.routing.policy import Candidate, PickRequest
from tests.cluster.test_router_queue import cluster_of, enter, fill, placed, request, room_of
from tests.support.clock import FakeClock
from tests.support.picks import pick_endpoint
from tests.support.until import until

#: Tokens of the requests for which the fake has no room at first.
LARGE = 5000


@dataclass
class FakeStay:
    """A request in the fake's memory."""

    served: list[bool]
    note: tuple[str, object] | None = ("fake", "left")
    last: bool = False
    calls_tool: bool = True

    def end(self, now: float, *, served: bool) -> None:
        self.served.append(served)


@dataclass
class FakeWait:
    """A request that waits for the fake's room."""

    rule: FakeRule
    ended: bool = False

    def has_room(self, candidates: Sequence[Candidate], now: float) -> bool:
        return self.rule.open

    def over(self, now: float) -> None:
        self.ended = True


@dataclass
class FakeRule:
    """A rule by which large requests wait until it is open."""

    open: bool = False
    later_s: float | None = None
    late_s: float | None = None
    barred: frozenset[EndpointId] = frozenset()
    served: list[bool] = field(default_factory=list)
    waits: list[FakeWait] = field(default_factory=list)
    forgotten: list[EndpointId] = field(default_factory=list)
    change_at: float = float("inf")
    waiting_when_asked: int = 0  # when to come again

    def restrict(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> PickRequest:
        if request.facts.prompt_tokens < LARGE or self.open:
            return msgspec.structs.replace(request, excluded=request.excluded | self.barred)
        return msgspec.structs.replace(request, waits_for_room=True)

    def place(self, request: PickRequest, endpoint: EndpointId, now: float) -> FakeStay:
        return FakeStay(self.served)

    def wait(self, request: PickRequest, now: float) -> FakeWait:
        self.waits.append(FakeWait(self))
        return self.waits[-1]

    def retry_after_s(self, request: PickRequest, max_wait_s: float, now: float) -> float | None:
        self.waiting_when_asked = sum(not wait.ended for wait in self.waits)
        return self.later_s if max_wait_s else self.late_s

    def next_change_at(self, now: float) -> float:
        return self.change_at

    def forget(self, endpoint: EndpointId) -> None:
        self.forgotten.append(endpoint)


def ruled(clock: FakeClock, metrics: Metrics | None = None, **queue: object) -> tuple[Cluster, RouterQueue, FakeRule]:
    """Return a cluster with a fake rule."""
    cluster = cluster_of(clock, metrics=metrics, **queue)
    rule = FakeRule()
    cluster.admission = room_of(cluster).admission = rule
    return cluster, room_of(cluster), rule


async def test_a_request_waits_for_room_and_others_pass(clock: FakeClock) -> None:
    """The endpoints are idle, and what needs no room is placed at once."""
    metrics = Metrics()
    cluster, queue, rule = ruled(clock, metrics)
    waiting = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    await placed(enter(cluster, 100))
    assert queue.status(clock())["waiting_for_room"] == 1
    rule.open = True
    queue.on_load_decrease()
    await placed(waiting)
    assert rule.waits[0].ended
    assert queue.status(clock())["released"]["room"] == 1  # type: ignore[index]
    assert metrics.group(RoutingMetrics).router_queue_exits.labels("c", "room").value == 1


async def test_requests_in_turn_are_not_held_back_by_sessions_without_room(clock: FakeClock) -> None:
    """Each has lines of its own."""
    cluster, queue, _rule = ruled(clock)
    large = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    picks = await fill(cluster, 4999)
    small = enter(cluster, 100)
    await until(lambda: len(queue) == 2)
    picks[0].settle(AttemptOutcome.SUCCESS, clock())
    await placed(small)
    assert len(queue) == 1
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    assert len(queue) == 0


async def test_the_rule_counts_what_waits_for_its_turn_alone(clock: FakeClock) -> None:
    """Until it is placed or its client leaves, so that its session is not taken for idle."""
    cluster, queue, rule = ruled(clock)
    picks = await fill(cluster, 4999)
    tasks = [enter(cluster, 100) for _ in range(2)]
    await until(lambda: len(queue) == 2)
    assert [wait.ended for wait in rule.waits] == [False, False]
    assert queue.status(clock())["waiting_for_room"] == 0
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert [wait.ended for wait in rule.waits] == [False, True]
    picks[0].settle(AttemptOutcome.SUCCESS, clock())
    await placed(tasks[0])
    assert rule.waits[0].ended


async def test_requests_of_one_line_go_in_order_of_arrival_whatever_their_size(clock: FakeClock) -> None:
    """Unlike those that wait for their turn alone."""
    cluster, queue, rule = ruled(clock)
    order: list[str] = []
    tasks = []
    for name, tokens in (("large", 90_000), ("small", LARGE)):
        task = enter(cluster, tokens)
        task.add_done_callback(lambda _, name=name: order.append(name))
        tasks.append(task)
        await until(lambda: len(queue) == len(tasks))
        clock.advance(1.0)
    rule.open = True
    for done in (1, 2):
        queue.on_load_decrease()
        await until(lambda done=done: len(order) >= done)
    assert order == ["large", "small"]


async def test_a_client_that_leaves_ends_its_wait(clock: FakeClock) -> None:
    """The rule keeps no room for it any longer."""
    cluster, queue, rule = ruled(clock)
    leaves = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert rule.waits[0].ended
    assert len(queue) == 0


async def test_a_session_that_could_not_begin_in_time_is_refused_at_once(clock: FakeClock) -> None:
    """With the time after which it should come again."""
    cluster, queue, rule = ruled(clock)
    rule.later_s = 42.0
    with pytest.raises(QueueFull) as refused:
        await enter(cluster, LARGE)
    assert refused.value.retry_after_s == 42.0
    assert queue.status(clock())["refused"] == 1
    assert not rule.waits


@pytest.mark.parametrize("late_s", [7.0, None], ids=["new", "begun"])
async def test_after_the_longest_wait_new_sessions_are_refused_and_others_pass(
    clock: FakeClock, late_s: float | None
) -> None:
    """A session that has begun goes on where it has no room."""
    cluster, queue, rule = ruled(clock, max_wait=10.0)
    rule.late_s = late_s
    waiting = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    clock.advance(11.0)
    queue.on_load_decrease()
    if late_s is None:
        await placed(waiting)
        assert queue.status(clock())["released"]["max_wait"] == 1  # type: ignore[index]
    else:
        with pytest.raises(QueueFull) as refused:
            await waiting
        assert refused.value.retry_after_s == late_s
        assert rule.waiting_when_asked == 1  # its own wait tells how long the next one may be
        assert queue.status(clock())["refused"] == 1
    assert rule.waits[0].ended


async def test_one_whose_turn_comes_when_there_is_no_room_waits_for_room(clock: FakeClock) -> None:
    """It had room when it came, and waited for an endpoint with capacity alone."""
    cluster, queue, rule = ruled(clock)
    picks = await fill(cluster, 4999)
    rule.open = True
    waiting = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    assert queue.status(clock())["waiting_for_room"] == 0
    rule.open = False
    for pick in picks:
        pick.settle(AttemptOutcome.SUCCESS, clock())
    await until(lambda: queue.status(clock())["waiting_for_room"] == 1)
    rule.open = True
    queue.on_load_decrease()
    await placed(waiting)
    assert [wait.ended for wait in rule.waits] == [True, True]  # for its turn, and then for room
    assert len(queue) == 0


@pytest.mark.parametrize("enabled", [True, "auto"], ids=["set up", "on by itself"])
async def test_with_the_queue_full_no_room_is_waited_for(clock: FakeClock, enabled: object) -> None:
    """A new session is refused, and its wait is over. One that has begun goes on without room in a queue that is on by
    itself."""
    cluster, queue, rule = ruled(clock, limit=1, enabled=enabled)
    rule.late_s = 5.0
    waiting = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    with pytest.raises(QueueFull) as refused:
        await enter(cluster, LARGE)
    assert rule.waits[1].ended
    assert queue.status(clock())["refused"] == 1
    if enabled == "auto":
        assert refused.value.retry_after_s == 5.0
        rule.late_s = None
        await placed(enter(cluster, LARGE))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_room_that_appears_with_time_alone_is_found(clock: FakeClock) -> None:
    """The queue looks again when the rule expects it."""
    cluster, queue, rule = ruled(clock)
    rule.change_at = 0.0
    waiting = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    rule.open = True
    await placed(waiting)


async def test_a_rule_that_is_switched_off_holds_nothing(clock: FakeClock) -> None:
    """Requests that waited by it are placed."""
    cluster, queue, _rule = ruled(clock)
    waiting = enter(cluster, LARGE)
    await until(lambda: len(queue) == 1)
    cluster.admission = queue.admission = None
    queue.on_load_decrease()
    await placed(waiting)


async def test_the_rule_learns_how_requests_end_and_which_endpoints_are_gone(clock: FakeClock) -> None:
    """Once each, and retries obey it as well."""
    cluster, _queue, rule = ruled(clock)
    first, second = await fill(cluster, 100)
    first.settle(AttemptOutcome.SUCCESS, clock())
    first.settle(AttemptOutcome.CANCELLED, clock())
    second.suspend(clock())
    assert rule.served == [True, False]
    retry = msgspec.structs.replace(request(10), excluded=frozenset({EndpointId("b")}))
    picked = pick_endpoint(cluster, retry, clock())
    assert picked is not None
    assert picked.endpoint.id == "a"
    rule.barred = frozenset({EndpointId("a")})
    assert pick_endpoint(cluster, retry, clock()) is None
    picked = pick_endpoint(cluster, request(10), clock())
    assert picked is not None
    assert picked.endpoint.id == "b"
    cluster.forget_process(cluster.endpoints[0].engine)
    cluster.operator.remove_endpoint(EndpointId("b"))
    assert rule.forgotten[0] == "a"
