"""Several routers in virtual time."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from kvproxy.cluster.routing.costs import wait_s
from kvproxy.cluster.routing.speeds import SpeedModel, SpeedPriors
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.replicas import ManyRouters, Replica, RoutersPlan
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.router import LiveRequest, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import IndexMode, Pace, ReplayFleet
from kvproxy.lab.replay.trace import Turn
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.timing import EngineTiming
from tests.lab.replay.traces import agents, shared_prefix_trace

BLOCK = 512
KV_AWARE = PolicySpec.parse("kv_aware")
#: The same for all, whatever they learn.
SPEEDS = SpeedModel(SpeedPriors())


def engine(fleet: ReplayFleet) -> SimEndpoint:
    return SimEndpoint(endpoint_id(0), 0, Engine(fleet.engine_settings(BLOCK, 0, 100.0)))


def many(delay_s: float | None, *, count: int = 2) -> tuple[ManyRouters, list[Replica]]:
    """Routers before one engine."""
    fleet = ReplayFleet(instances=1, index=IndexMode.APPROXIMATE)
    engines = [engine(fleet)]
    views = [IndexView(fleet, BLOCK, rng=Random(1)) for _ in range(count)]
    replicas = [Replica(n, engines, [0], KV_AWARE.make(rng=Random(n)), view) for n, view in enumerate(views)]
    return ManyRouters(replicas, engines, [0], delay_s, chance=Random(7)), replicas


def one() -> VirtualRouter:
    fleet = ReplayFleet(instances=1, index=IndexMode.APPROXIMATE)
    return VirtualRouter([engine(fleet)], KV_AWARE.make(rng=Random(0)), IndexView(fleet, BLOCK, rng=Random(1)))


def request(number: int, now: float) -> LiveRequest:
    turn = Turn(0.0, BLOCK * 8, 20, array("Q", range(100 * number, 100 * number + 8)))
    return LiveRequest(number, 0, turn, ReplayOutcome(now, turn.prompt_tokens), name=str(number))


def waits(routers: ManyRouters, replicas: list[Replica], now: float) -> list[float]:
    """Of the engine, as each router sees it."""
    routers.release(now)  # what was said by now is there
    return [wait_s(replica.endpoints[0], SPEEDS, now) for replica in replicas]


def test_routers_that_hear_at_once_see_the_waits_of_one() -> None:
    """A request that one router placed is known to all, with its first token and its end."""
    (routers, replicas), single = many(0.0), one()
    placed = []
    for number in range(6):
        now = 0.01 * number
        placed.append((routers.arrive(request(number, now), now), single.arrive(request(number, now), now)))
        assert waits(routers, replicas, now) == pytest.approx(2 * [wait_s(single.endpoints[0], SPEEDS, now)])
    assert all(replica.endpoints[0].load.own_in_flight for replica in replicas)  # both placed some
    for index, (theirs, its) in enumerate(placed):
        assert theirs is not None
        assert its is not None
        now = 0.1 + 0.05 * index
        routers.first_token(theirs, now)
        single.first_token(its, now)
        assert waits(routers, replicas, now) == pytest.approx(2 * [wait_s(single.endpoints[0], SPEEDS, now)])
        routers.finished(theirs, now)
        single.finished(its, now)
    assert waits(routers, replicas, 1.0) == [0.0, 0.0]
    assert [replica.endpoints[0].load.in_flight for replica in replicas] == [0, 0]


@pytest.mark.parametrize(("delay_s", "heard_at"), [(0.05, 0.05), (None, None)])
def test_a_placement_is_heard_after_the_delay(delay_s: float | None, heard_at: float | None) -> None:
    """Until then, and without the exchange for ever, it is its router's alone."""
    routers, replicas = many(delay_s)
    routers.arrive(request(0, 0.0), 0.0)

    def known() -> list[int]:
        return sorted(replica.endpoints[0].load.in_flight for replica in replicas)

    routers.release(0.049)
    assert known() == [0, 1]
    routers.release(0.051)
    assert known() == ([0, 1] if heard_at is None else [1, 1])


@pytest.mark.parametrize("index", IndexMode)
def test_routers_play_all_there_is(index: IndexMode) -> None:
    """Queue, priorities, and engines that leave and join: each request is answered, and no router keeps any."""
    fleet = ReplayFleet(instances=3, index=index, leaves=((0, 0.3),), joins=((0, 0.6),))
    made: list[VirtualRouter] = []

    class Noted(VirtualRouter):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            made.append(self)

    trace = shared_prefix_trace(100)
    policies = [KV_AWARE.make(rng=Random(seed)) for seed in range(3)]
    spec = PolicySpec.parse("kv_aware+priority")
    outcomes = play_policy(trace, Pace(0.5), fleet, policies[0], spec, seed=1, router_type=Noted,
                           beside=policies[1:], delay_s=0.01)  # fmt: skip
    assert len(outcomes) == 100
    assert sum(one.finished_at is None for one in outcomes) <= 20  # broken off where the engine was lost
    assert {one.endpoint for one in outcomes} == {0, 1, 2}
    assert [[each.load.own_in_flight for each in router.endpoints] for router in made] == 3 * [[0, 0, 0]]


def test_routers_admit_sessions_as_one() -> None:
    """Together they fill the memory once, so that turns find their contexts; without an exchange each fills it."""
    fleet = ReplayFleet(
        instances=1, capacity_tokens=8192, reuse_outputs=True, timing=EngineTiming(prefill_tokens_per_s=500.0)
    )
    trace = agents(12, 16, apart_ms=1000)

    def hits(routers: int, delay_s: float | None) -> float:
        policies = [KV_AWARE.make(rng=Random(seed)) for seed in range(routers)]
        outcomes = play_policy(
            trace,
            Pace(),
            fleet,
            policies[0],
            PolicySpec.parse("kv_aware"),
            beside=policies[1:],
            delay_s=delay_s,
            seed=1,
        )
        return sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes)

    single = hits(1, None)
    assert hits(3, 0.01) > 0.95 * single
    assert hits(3, None) < 0.8 * single


def test_a_plan_says_what_it_is() -> None:
    """As the report's title has it."""
    assert str(RoutersPlan(4, 0.05)) == "routers: 4, 50 ms late"
    assert str(RoutersPlan(2, None)) == "routers: 2, no exchange"


def test_how_late_others_are_is_measured_while_they_talk() -> None:
    """There and back is counted from the beat that is answered, whatever came after it."""
    routers, replicas = many(0.05)
    for number in range(40):
        now = 0.1 * number
        placement = routers.arrive(request(number, now), now)
        assert placement is not None
        routers.finished(placement, now + 0.05)
    lags_s = [peer.lag.round_trip_s for replica in replicas for peer in replica.peers.living]
    assert lags_s == pytest.approx([0.1, 0.1])
