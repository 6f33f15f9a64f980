"""Requests wait at the proxy while every endpoint has enough to prefill, and are placed one by one as load falls."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvproxy.base.errors import QueueFull
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.metrics import RoutingMetrics
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.router_queue import RouterQueue
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.screening import Refusal
from kvproxy.cluster.settings import (
    ClusterSettings,
    EndpointSettings,
    HealthCheckSettings,
    PolicyName,
    RouterQueueSettings,
)
from tests.support.clock import FakeClock
from tests.support.until import until


def settings_of(policy: PolicyName = PolicyName.KV_AWARE, **queue: Any) -> ClusterSettings:
    return ClusterSettings(
        policy=policy,
        endpoints=tuple(
            EndpointSettings(id=name, url=f"http://127.0.0.1:{port}") for name, port in (("a", 1), ("b", 2))
        ),
        health=HealthCheckSettings(active=False),
        queue=RouterQueueSettings(**queue),
    )


def cluster_of(clock: FakeClock, *, metrics: Metrics | None = None, **queue: Any) -> Cluster:
    settings = settings_of(**queue)
    cluster = Cluster("c", settings, metrics=metrics or Metrics(), clock=clock, rng=random.Random(1))
    cluster.bind_gauges()
    return cluster


def request(tokens: int) -> PickRequest:
    return PickRequest(facts=OverlapFacts(prompt_tokens=tokens))


def room_of(cluster: Cluster) -> RouterQueue:
    assert cluster.queue is not None
    return cluster.queue


def enter(cluster: Cluster, tokens: int, **more: Any) -> asyncio.Task[Pick | None]:
    return asyncio.create_task(pick_through(cluster, request(tokens), **more))


async def pick_through(
    cluster: Cluster,
    asked: PickRequest,
    *,
    again: Callable[[], PickRequest] | None = None,
    tenant: str = "",
    level: int = 0,
    within_s: float = math.inf,
) -> Pick | None:
    """As the proxy does: at once if it may, otherwise in its turn, asked `again` then."""
    queue = room_of(cluster)
    decision = cluster.decide(asked, cluster._clock())
    if isinstance(decision, Refusal):
        return None
    if queue.admits(decision, cluster._clock()):
        return cluster.reserve(decision, cluster._clock())

    def decide(now: float) -> Decision[Endpoint] | Refusal:
        return cluster.decide(asked if again is None else again(), now)

    def take(decision: Decision[Endpoint] | Refusal, now: float) -> Pick | None:
        return None if isinstance(decision, Refusal) else cluster.reserve(decision, now)

    return await queue.wait(decision, decide, take, tenant=tenant, level=level, within_s=within_s)


async def placed(task: asyncio.Task[Pick | None]) -> Pick:
    pick = await asyncio.wait_for(task, 60)
    assert pick is not None
    return pick


async def fill(cluster: Cluster, tokens: int = 20_000) -> list[Pick]:
    """Work for both endpoints, more than the queue admits below."""
    return [await placed(enter(cluster, tokens)) for _ in range(2)]


async def test_free_endpoints_take_requests_at_once(clock: FakeClock) -> None:
    """No request waits while an endpoint has little pending, and both get one."""
    cluster = cluster_of(clock)
    picks = await fill(cluster)
    assert {pick.endpoint.id for pick in picks} == {"a", "b"}
    assert len(room_of(cluster)) == 0


async def test_short_requests_overtake_long_ones_when_load_falls(clock: FakeClock) -> None:
    """One first token makes room for one request: the shortest, though it came last."""
    cluster = cluster_of(clock)
    picks = await fill(cluster)
    long, short = enter(cluster, 9_000), enter(cluster, 6_000)
    await until(lambda: len(room_of(cluster)) == 2)
    picks[0].first_token(clock())
    pick = await placed(short)
    assert pick.endpoint is picks[0].endpoint
    assert not long.done()
    pick.settle(AttemptOutcome.SUCCESS, clock())
    await placed(long)


async def test_an_error_in_placing_one_request_is_its_own(clock: FakeClock) -> None:
    """The others that wait are placed as if it had not been there."""

    def broken() -> PickRequest:
        raise ValueError("no facts")

    cluster = cluster_of(clock)
    first, _ = await fill(cluster)
    bad, good = enter(cluster, 100, again=broken), enter(cluster, 200)
    await until(lambda: len(room_of(cluster)) == 2)
    first.settle(AttemptOutcome.SUCCESS, clock())
    with pytest.raises(ValueError, match="no facts"):
        await asyncio.wait_for(bad, 60)
    assert (await placed(good)).endpoint is first.endpoint


async def test_a_place_given_to_a_client_that_leaves_in_the_same_turn_is_given_back(clock: FakeClock) -> None:
    """Its endpoint would count it for ever."""
    cluster = cluster_of(clock)
    first, _ = await fill(cluster)
    waiting = enter(cluster, 200)
    await until(lambda: len(room_of(cluster)) == 1)
    first.settle(AttemptOutcome.SUCCESS, clock())
    while len(room_of(cluster)):  # noqa: ASYNC110 - the very turn in which it is placed
        await asyncio.sleep(0)
    assert sum(endpoint.load.in_flight for endpoint in cluster.endpoints) == 2
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert sum(endpoint.load.in_flight for endpoint in cluster.endpoints) == 1


class Body:
    """Held by a request while it waits, as its bytes are by the proxy."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken

    def __call__(self) -> PickRequest:
        if self.is_broken:
            raise ValueError("no facts")
        return request(200)


@pytest.mark.parametrize("end", ["placed", "left", "failed"])
async def test_a_request_that_waited_is_freed_at_once(clock: FakeClock, end: str) -> None:
    """A cycle with its ticket, or the entry that stays in a line, would keep its body for hours of steady traffic."""
    cluster = cluster_of(clock)
    first, _ = await fill(cluster)
    body = Body(is_broken=end == "failed")
    held = weakref.ref(body)
    waiting = enter(cluster, 200, again=body)
    await until(lambda: len(room_of(cluster)) == 1)
    gc.disable()
    try:
        if end == "left":
            waiting.cancel()
        else:
            first.settle(AttemptOutcome.SUCCESS, clock())
        await asyncio.wait([waiting])
        assert end == "left" or (waiting.exception() is None) is (end == "placed")
        del waiting, body
        await asyncio.sleep(0)
        assert held() is None
    finally:
        gc.enable()


async def test_a_higher_level_goes_first(clock: FakeClock) -> None:
    """Though it is longer, as many levels as that is worth."""
    cluster = cluster_of(clock)
    picks = await fill(cluster)
    low, high = enter(cluster, 5_000), enter(cluster, 50_000, level=4)
    await until(lambda: len(room_of(cluster)) == 2)
    picks[1].settle(AttemptOutcome.FAILURE, clock())
    await placed(high)
    low.cancel()
    await asyncio.gather(low, return_exceptions=True)


async def test_a_full_queue_refuses_and_says_when_to_come_back(clock: FakeClock) -> None:
    """Bounded, with a time for `retry-after`."""
    cluster = cluster_of(clock, limit=1, max_wait="7s")
    await fill(cluster)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    with pytest.raises(QueueFull) as refused:
        await enter(cluster, 5_000)
    assert refused.value.retry_after_s == 7.0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(room_of(cluster)) == 0


async def test_nobody_waits_longer_than_the_bound(clock: FakeClock) -> None:
    """Then it goes out although nothing became free."""
    metrics = Metrics()
    cluster = cluster_of(clock, metrics=metrics, max_wait="5s")
    await fill(cluster, 80_000)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    clock.advance(5.0)
    room_of(cluster).on_load_decrease()
    await placed(waiting)
    held = metrics.group(RoutingMetrics).router_queue_wait.labels("c")
    assert (sum(held.counts), held.total) == (1, 5.0)


async def test_the_earliest_deadline_goes_first_and_is_kept(clock: FakeClock) -> None:
    """`max_wait` is the deadline of those without; the wait that is shown is the true one."""
    cluster = cluster_of(clock, max_wait="100s")
    picks = await fill(cluster, 80_000)
    short = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    clock.advance(1.0)
    soon, later = enter(cluster, 50_000, within_s=5.0), enter(cluster, 50_000, within_s=1000.0)
    await until(lambda: len(room_of(cluster)) == 3)
    clock.advance(2.0)
    assert room_of(cluster).status(clock())["oldest_wait_s"] == 2.0
    picks[1].settle(AttemptOutcome.CANCELLED, clock())
    (await placed(soon)).settle(AttemptOutcome.CANCELLED, clock())
    (await placed(short)).settle(AttemptOutcome.CANCELLED, clock())
    await placed(later)
    late = enter(cluster, 80_000, within_s=5.0)
    await until(lambda: len(room_of(cluster)) == 1)
    clock.advance(5.0)
    room_of(cluster).on_load_decrease()
    await placed(late)


@pytest.mark.parametrize("way", ["overdue", "queue off"])
async def test_many_that_may_go_at_once_leave_other_tasks_their_turn(clock: FakeClock, way: str) -> None:
    """A thousand that waited for the same bound, or for a queue that is no more, hold no stream up meanwhile."""
    cluster = cluster_of(clock, max_wait="5s")
    room = room_of(cluster)
    await fill(cluster, 80_000)
    waiting = [enter(cluster, 5_000) for _ in range(60)]
    await until(lambda: len(room) == 60)
    if way == "overdue":
        clock.advance(5.0)
        room.on_load_decrease()
    else:
        cluster.reconfigure(settings_of(enabled=False), probe=None)
    left = [60]
    while left[-1]:
        await asyncio.sleep(0)
        left.append(len(room))
    assert max(before - after for before, after in pairwise(left)) <= 10
    for each in waiting:
        await placed(each)


async def test_time_alone_lets_somebody_in(clock: FakeClock) -> None:
    """The room looks again by itself when an endpoint's pending prefill should be done."""
    cluster = cluster_of(clock, max_wait="20ms")
    await fill(cluster, 80_000)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    clock.advance(1.0)  # the timer was set by the loop's own clock and looks at ours
    await placed(waiting)


async def test_a_client_that_leaves_while_it_waits_leaves_no_trace(clock: FakeClock) -> None:
    """Neither a place in the queue nor a reservation, also when its turn came in the same moment."""
    cluster = cluster_of(clock)
    picks = await fill(cluster)
    gone, lucky = enter(cluster, 5_000), enter(cluster, 6_000)
    await until(lambda: len(room_of(cluster)) == 2)
    picks[0].first_token(clock())  # gives `gone` its place ...
    gone.cancel()  # ... before it could take it
    await asyncio.gather(gone, return_exceptions=True)
    assert gone.cancelled()
    await placed(lucky)
    assert sum(endpoint.load.in_flight for endpoint in cluster.endpoints) == 3


async def test_the_request_is_asked_again_when_its_turn_comes(clock: FakeClock) -> None:
    """Caches may have changed while it waited."""
    cluster = cluster_of(clock)
    picks = await fill(cluster)
    asked: list[float] = []

    def fresh() -> PickRequest:
        asked.append(clock())
        held = {EndpointId(name): Overlap(4_900) for name in ("a", "b")}
        return PickRequest(facts=OverlapFacts(5_000, held))

    room = room_of(cluster)
    waiting = asyncio.create_task(pick_through(cluster, request(5_000), again=fresh))
    await until(lambda: len(room) == 1)
    clock.advance(0.01)
    picks[0].first_token(clock())
    pick = await placed(waiting)
    assert (asked, pick.reservation.cached_tokens) == ([1000.01], 4_900)


async def test_without_endpoints_nobody_waits_for_nothing(clock: FakeClock) -> None:
    """The refusal comes at once."""
    cluster = cluster_of(clock)
    for endpoint in cluster.endpoints:
        cluster.operator.drain_endpoint(endpoint.id)
    assert await enter(cluster, 100) is None


def test_a_queue_can_be_turned_off(clock: FakeClock) -> None:
    """Then no request waits at the proxy."""
    assert cluster_of(clock, enabled=False).queue is None


async def test_waiting_and_released_requests_are_shown(clock: FakeClock) -> None:
    """Every way out is counted once, for people and as metrics."""
    metrics = Metrics()
    cluster = cluster_of(clock, metrics=metrics, limit=3, max_wait="7s")
    room = room_of(cluster)
    picks = await fill(cluster, 80_000)
    turn, overdue, leaves = (enter(cluster, tokens) for tokens in (5_000, 9_000, 9_500))
    await until(lambda: len(room) == 3)
    with pytest.raises(QueueFull):
        await enter(cluster, 5_000)
    clock.advance(2.0)
    shown = room.status(clock())
    assert (shown["depth"], shown["limit"], shown["oldest_wait_s"], shown["max_wait_s"]) == (3, 3, 2.0, 7.0)
    assert metrics.registry.get_sample_value("kvproxy_router_queue_oldest_wait_seconds", {"cluster": "c"}) == 2.0
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    picks[0].settle(AttemptOutcome.CANCELLED, clock())
    await placed(turn)
    for endpoint in cluster.endpoints:  # a request placed now has a long way to go
        endpoint.load.reserve(200_000, 0, clock())
    clock.advance(5.0)
    room.on_load_decrease()
    await placed(overdue)
    shown = room.status(clock())
    assert shown["released"] == {
        "turn": 1,
        "room": 0,
        "max_wait": 1,
        "no_endpoint": 0,
        "arrived": 0,
        "queue_off": 0,
        "client_left": 1,
    }
    assert (shown["refused"], shown["depth"], shown["oldest_wait_s"]) == (1, 0, 0.0)
    for reason in ("turn", "max_wait", "client_left", "refused"):
        assert (
            metrics.registry.get_sample_value("kvproxy_router_queue_exits_total", {"cluster": "c", "reason": reason})
            == 1
        )


async def test_nobody_left_to_take_it_is_counted(clock: FakeClock) -> None:
    """Its turn comes, and the refusal is its answer."""
    cluster = cluster_of(clock)
    await fill(cluster)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    for endpoint in cluster.endpoints:
        cluster.operator.drain_endpoint(endpoint.id)
    room_of(cluster).on_load_decrease()
    assert await waiting is None
    assert room_of(cluster).status(clock())["released"]["no_endpoint"] == 1  # type: ignore[index]


async def test_other_settings_find_the_same_requests_waiting(clock: FakeClock) -> None:
    """A reload drops no request; here a shorter bound places at once those over it."""
    metrics = Metrics()
    cluster = cluster_of(clock, metrics=metrics, max_wait="30s")
    room = room_of(cluster)
    await fill(cluster, 80_000)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room) == 1)
    clock.advance(6.0)
    cluster.reconfigure(settings_of(limit=9), probe=None)
    assert (cluster.queue, len(room), room.status(clock())["limit"]) == (room, 1, 9)
    assert metrics.registry.get_sample_value("kvproxy_queue_limit", {"queue": "router/c"}) == 9
    cluster.reconfigure(settings_of(max_wait="5s"), probe=None)
    await placed(waiting)
    assert len(room) == 0


@pytest.mark.parametrize("after", [settings_of(enabled=False), settings_of(PolicyName.ROUND_ROBIN)])
async def test_a_queue_that_is_taken_away_places_whoever_waits(clock: FakeClock, after: ClusterSettings) -> None:
    """Also where it goes because the new policy knows nothing of prefills; its gauges go too, and may come back."""
    metrics = Metrics()
    cluster = cluster_of(clock, metrics=metrics)
    room = room_of(cluster)
    await fill(cluster, 80_000)
    waiting = [enter(cluster, 5_000) for _ in range(2)]
    await until(lambda: len(room) == 2)
    cluster.reconfigure(after, probe=None)
    assert cluster.queue is None
    for each in waiting:
        await placed(each)
    assert room.status(clock())["released"]["queue_off"] == 2  # type: ignore[index]
    assert metrics.registry.get_sample_value("kvproxy_queue_depth", {"queue": "router/c"}) is None
    assert metrics.registry.get_sample_value("kvproxy_router_queue_oldest_wait_seconds", {"cluster": "c"}) is None
    cluster.reconfigure(settings_of(), probe=None)
    assert metrics.registry.get_sample_value("kvproxy_queue_depth", {"queue": "router/c"}) == 0


async def test_a_cluster_that_is_no_more_keeps_nobody_waiting(clock: FakeClock) -> None:
    """They are refused, as a request that comes now is."""
    metrics = Metrics()
    cluster = cluster_of(clock, metrics=metrics)
    await fill(cluster)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    cluster.close()
    assert await waiting is None
    assert metrics.registry.get_sample_value("kvproxy_queue_limit", {"queue": "router/c"}) is None


async def test_a_client_that_left_in_this_very_moment_is_passed_over(clock: FakeClock) -> None:
    """Its task has not run since; its turn is the next one's, and it counts as a client that left."""
    cluster = cluster_of(clock)
    picks = await fill(cluster)
    gone, lucky = enter(cluster, 5_000), enter(cluster, 6_000)
    await until(lambda: len(room_of(cluster)) == 2)
    gone.cancel()
    picks[0].first_token(clock())
    await placed(lucky)
    await asyncio.gather(gone, return_exceptions=True)
    released = room_of(cluster).status(clock())["released"]
    assert released == {
        "turn": 1,
        "room": 0,
        "max_wait": 0,
        "no_endpoint": 0,
        "arrived": 0,
        "queue_off": 0,
        "client_left": 1,
    }


def two_models(clock: FakeClock) -> Cluster:
    """`busy` is served by a and b, `idle` by c alone."""
    endpoints = [
        EndpointSettings(id=name, url=f"http://127.0.0.1:{port}", models=(model,))
        for port, (name, model) in enumerate((("a", "busy"), ("b", "busy"), ("c", "idle")), 1)
    ]
    settings = ClusterSettings(
        endpoints=tuple(endpoints), health=HealthCheckSettings(active=False), queue=RouterQueueSettings()
    )
    return Cluster("c", settings, metrics=Metrics(), clock=clock, rng=random.Random(1))


def of_model(model: str, tokens: int) -> PickRequest:
    return PickRequest(model=model, facts=OverlapFacts(prompt_tokens=tokens))


async def test_one_idle_model_lets_nothing_of_another_go(clock: FakeClock) -> None:
    """Its endpoint has room all the time, which is none for requests of the other model; its own wait for nothing."""
    cluster = two_models(clock)
    room = room_of(cluster)

    def start(model: str, tokens: int) -> asyncio.Task[Pick | None]:
        return asyncio.create_task(pick_through(cluster, of_model(model, tokens)))

    busy = [await placed(start("busy", 20_000)) for _ in range(2)]
    long, short = start("busy", 9_000), start("busy", 6_000)
    await until(lambda: len(room) == 2)
    room.on_load_decrease()
    assert (await placed(start("idle", 100))).endpoint.id == "c"
    assert len(room) == 2
    busy[0].first_token(clock())
    assert (await placed(short)).endpoint is busy[0].endpoint
    assert not long.done()
    busy[1].first_token(clock())
    await placed(long)


async def test_a_model_with_room_does_not_wait_for_another_ones_turn(clock: FakeClock) -> None:
    """Requests of a busy model wait; the one of the idle model is looked at behind them and goes."""
    cluster = two_models(clock)
    for _ in range(2):
        await placed(asyncio.create_task(pick_through(cluster, of_model("busy", 20_000))))
    waiting = asyncio.create_task(pick_through(cluster, of_model("busy", 6_000)))
    await until(lambda: len(room_of(cluster)) == 1)
    assert (await placed(asyncio.create_task(pick_through(cluster, of_model("idle", 100))))).endpoint.id == "c"
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_hot_prefix_waits_for_no_endpoint_while_another_is_idle(clock: FakeClock) -> None:
    """The endpoint that holds it is busy, and the policy still sends it there: that is no reason to hold it."""
    cluster = cluster_of(clock)
    (busy, _) = cluster.endpoints
    busy.load.reserve(20_000, 0, clock())
    hot = PickRequest(facts=OverlapFacts(200_000, {busy.id: Overlap(199_900)}))
    assert (await placed(asyncio.create_task(pick_through(cluster, hot)))).endpoint is busy


async def test_by_default_a_full_queue_refuses_nothing(clock: FakeClock) -> None:
    """A request that it has no place for goes at once, as it would without."""
    cluster = cluster_of(clock, enabled="auto", limit=1)
    await fill(cluster)
    waiting = enter(cluster, 5_000)
    await until(lambda: len(room_of(cluster)) == 1)
    await placed(enter(cluster, 5_000))
    assert not waiting.done()
    assert room_of(cluster).status(clock())["refused"] == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(("policy", "waits"), [(PolicyName.KV_AWARE, True), (PolicyName.ROUND_ROBIN, False)])
def test_a_cluster_has_a_queue_where_nothing_is_said(clock: FakeClock, policy: PolicyName, waits: bool) -> None:
    """If its policy knows how long a prefill takes; it waits for no first endpoint then."""
    settings = ClusterSettings(policy=policy, health=HealthCheckSettings(active=False))
    cluster = Cluster("c", settings, metrics=Metrics(), clock=clock, rng=random.Random(1))
    assert (cluster.queue is not None) == waits
    assert cluster.queue is None or not cluster.queue.awaits
