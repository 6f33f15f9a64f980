"""Other settings for a running cluster: what is known of its endpoints stays, and what was learned of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvproxy.base.settings.model import BreakerSettings
from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.membership import CONFIGURED_BY
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing import registry
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.simple import LeastRequest
from kvproxy.cluster.routing.work import features_of
from kvproxy.cluster.settings import (
    ClusterSettings,
    EndpointSettings,
    HealthCheckSettings,
    PolicyName,
)
from tests.cluster.conftest import GREEDY, Bench, MakeCluster, configs
from tests.support.until import until

A, B = EndpointId("a"), EndpointId("b")


def reconfigure(bench: Bench, **changes: Any) -> None:
    """Apply the same settings with these changes."""
    settings = type(bench.cluster.settings).model_validate({**bench.cluster.settings.model_dump(), **changes})
    bench.cluster.reconfigure(settings, probe=None)


def taught(bench: Bench, endpoint: str = "a", tokens: int = 8000) -> None:
    """One first token, after as many seconds as would be one at twice the speed that is believed first."""
    pick = bench.picked(preferred=EndpointId(endpoint))
    bench.endpoint(endpoint).load.on_sample(features_of(tokens, 0), 2.0, bench.clock())  # type: ignore[misc]
    pick.settle(AttemptOutcome.SUCCESS, bench.clock())


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "least_request"},
        {"health": {"active": False, "interval": 9}},
        {"max_in_flight": 7},
        {"queue": {}},
        {"breaker": {"recovery_timeout": 99}},
    ],
)
def test_facts_about_endpoints_stay(make_cluster: MakeCluster, changes: dict[str, Any]) -> None:
    """Whatever else changes: which endpoint is ejected, whose breaker is open, and what is in flight where."""
    bench = make_cluster("a", "b", "c", "d", breaker=BreakerSettings(failure_threshold=2))
    before = bench.cluster.endpoints
    bench.outcomes("a", AttemptOutcome.FAILURE, times=3)  # opens a's breaker, and ejects it
    pick = bench.picked(preferred=B)
    bench.cluster.operator.drain_endpoint(EndpointId("c"))
    conditions = [endpoint.condition(bench.clock()) for endpoint in before]
    assert conditions == [Condition.EJECTED, Condition.UP, Condition.DRAINING, Condition.UP]
    reconfigure(bench, **changes)
    assert bench.cluster.endpoints == before
    assert [endpoint.condition(bench.clock()) for endpoint in before] == conditions
    assert bench.endpoint("a").breaker.state == "open"
    assert bench.endpoint("b").load.in_flight == 1
    pick.settle(AttemptOutcome.SUCCESS, bench.clock())
    assert bench.endpoint("b").load.in_flight == 0
    assert bench.ids() == {"b", "d"}


def test_new_bounds_count_from_now_on(make_cluster: MakeCluster) -> None:
    """Of breaker, ejection and requests in flight."""
    bench = make_cluster("a", "b", "c", "d")
    reconfigure(bench, breaker={"failure_threshold": 2}, health={"active": False, "eject_after": 0}, max_in_flight=1)
    bench.outcomes("a", AttemptOutcome.FAILURE)
    assert bench.endpoint("a").breaker.state == "closed"
    bench.outcomes("a", AttemptOutcome.FAILURE)
    assert bench.endpoint("a").condition(bench.clock()) is Condition.BREAKER_OPEN
    bench.picked(preferred=B)
    assert bench.endpoint("b").condition(bench.clock()) is Condition.SATURATED


def test_a_verdict_of_probes_ends_with_the_probes(make_cluster: MakeCluster) -> None:
    """Nothing would ever bring the endpoint back."""
    bench = make_cluster("a", "b")
    bench.endpoint("a").health.record_probe(False, bench.clock())
    assert bench.endpoint("a").condition(bench.clock()) is Condition.UNHEALTHY
    reconfigure(bench, health={"active": True, "interval": 2})
    assert bench.endpoint("a").condition(bench.clock()) is Condition.UNHEALTHY
    reconfigure(bench, health={"active": False})
    assert bench.ids() == {"a", "b"}
    assert bench.endpoint("a").health.failed_probes == 0


def test_a_policy_that_stays_is_the_same_one(make_cluster: MakeCluster) -> None:
    """With what it learned."""
    bench = make_cluster("a", "b", policy=PolicyName.LEAST_REQUEST)
    policy = bench.cluster.policies.own.policy
    assert isinstance(policy, LeastRequest)
    reconfigure(bench, queue={}, client_policies=["random"])
    assert bench.cluster.policies.own.policy is policy


class CountsBlocks(LeastRequest):
    """Asks for the live blocks of endpoints."""

    counts_live_blocks = True


@pytest.mark.parametrize("part", ["policy", "client_policies"])
def test_live_blocks_are_counted_while_a_policy_asks_for_them(
    make_cluster: MakeCluster, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part it plays, also for endpoints that come later; nothing is held before and after."""
    monkeypatch.setitem(registry.POLICIES, PolicyName.LEAST_REQUEST, CountsBlocks)  # type: ignore[arg-type]
    bench = make_cluster("a")
    facts = OverlapFacts(64, blocks=(1, 2, 3, 4), block_tokens=16.0)
    early = bench.picked(facts=facts)
    name = PolicyName.LEAST_REQUEST
    reconfigure(bench, **{part: [name] if part == "client_policies" else name})
    assert bench.endpoint("a").load.live is not None
    assert len(bench.endpoint("a").load.live) == 0
    reconfigure(bench, endpoints=[one.model_dump() for one in configs("a", "b")])
    picks = [bench.picked(preferred=B, facts=facts) for _ in range(2)]
    load = bench.endpoint("b").load
    assert load.live is not None
    assert (len(load.live), load.live.count_leading((1, 2, 9))) == (4, 2)
    picks[0].settle(AttemptOutcome.FAILURE, bench.clock())
    assert load.live is not None
    assert len(load.live) == 4
    reconfigure(bench, policy="round_robin", client_policies=[])
    assert load.live is None
    for pick in (early, picks[1]):
        pick.settle(AttemptOutcome.SUCCESS, bench.clock())


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("way", [[GREEDY], ["round_robin", GREEDY], [GREEDY, "kv_aware"]])
def test_learned_speeds_outlive_the_policy(make_cluster: MakeCluster, way: list[str]) -> None:
    """Also where a policy between them learns nothing; and learning goes on."""
    bench = make_cluster("a", "b", policy=PolicyName.KV_AWARE)
    taught(bench)
    learned = bench.cluster.speeds
    assert learned is not None
    for policy in way:
        reconfigure(bench, policy=policy)
    speeds = bench.cluster.speeds
    assert speeds is not None
    assert speeds.estimates(bench.clock()) == learned.estimates(bench.clock())
    taught(bench)
    assert speeds.estimates(bench.clock()).samples == 2
    assert learned.estimates(bench.clock()).samples == 1


def test_endpoints_that_left_a_policy_without_learning_are_forgotten(make_cluster: MakeCluster) -> None:
    """Its id may come back as another engine."""
    bench = make_cluster("a", "b", policy=PolicyName.KV_AWARE)
    taught(bench)
    reconfigure(bench, policy="round_robin")
    bench.cluster.apply_endpoints(configs("b"))
    bench.cluster.apply_endpoints(configs("a", "b"))
    reconfigure(bench, policy="kv_aware")
    assert bench.cluster.speeds is not None
    assert A not in bench.cluster.speeds.estimates(bench.clock()).slowness


@pytest.mark.usefixtures("greedy")
def test_a_replaced_endpoints_last_samples_go_nowhere(make_cluster: MakeCluster) -> None:
    """It has its requests still, and its id belongs to another one, when the policy changes."""
    bench = make_cluster("a", policy=PolicyName.KV_AWARE)
    pick = bench.picked()
    bench.cluster.apply_endpoints((EndpointSettings(id="a", url="http://127.0.0.1:7"),))
    reconfigure(bench, policy=GREEDY)
    assert pick.endpoint.load.on_sample is None
    assert bench.endpoint("a").load.on_sample is not None


def test_decisions_are_counted_under_the_new_policys_name(make_cluster: MakeCluster) -> None:
    """And the old one's stand."""
    bench = make_cluster("a", "b")
    bench.picked()
    reconfigure(bench, policy="least_request")
    bench.picked()
    for policy, reason in (("round_robin", "round_robin"), ("least_request", "least_request")):
        assert bench.sample("kvproxy_picks_total", cluster="c", policy=policy, reason=reason) == 1, policy


async def test_probes_go_on_with_other_settings(make_cluster: MakeCluster) -> None:
    """Another path, and another pace, for the same endpoints; or none at all."""
    asked: list[str] = []
    turns = asyncio.Semaphore(1)

    def probe_of(name: str) -> Any:
        async def probe(endpoint: Endpoint) -> bool:
            asked.append(name)
            return True

        return probe

    async def sleep(seconds: float) -> None:
        await turns.acquire()

    bench = make_cluster("a", with_={"probe": probe_of("old"), "sleep": sleep}, health=HealthCheckSettings())
    async with bench.cluster:
        await until(lambda: asked == ["old"])
        settings = bench.cluster.settings
        other = settings.model_copy(update={"health": HealthCheckSettings(path="/ready")})
        bench.cluster.reconfigure(other, probe=probe_of("new"))
        turns.release()
        await until(lambda: asked == ["old", "new"])
        bench.cluster.reconfigure(settings.model_copy(update={"health": HealthCheckSettings(active=False)}), probe=None)
        turns.release()
        await asyncio.sleep(0.01)
    assert asked == ["old", "new"]


async def test_very_many_static_endpoints_come_and_leave_over_some_turns(make_cluster: MakeCluster) -> None:
    """The first at once; what is asked for meanwhile replaces what was. A cluster that is no more has none."""
    names = [f"e{number}" for number in range(300)]
    async with make_cluster("e0").cluster as cluster:
        cluster.apply_endpoints(configs(*names))
        assert 1 < len(cluster.endpoints) < 100
        await until(lambda: len(cluster.endpoints) == 300)
        cluster.apply_endpoints(configs("e0"))
        assert len(cluster.endpoints) > 200
        cluster.apply_endpoints(configs("e1", "e2"))
        await until(lambda: [one.id for one in cluster.endpoints] == ["e1", "e2"])
        cluster.apply_endpoints(configs(*names))
        cluster.close()
        assert not cluster.endpoints
        await asyncio.sleep(0)
        assert not cluster.endpoints


class Noted(ClusterSettings):
    """Notes what is read of it."""

    def __getattribute__(self, name: str) -> Any:
        if name in ClusterSettings.model_fields:
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def test_only_settings_that_are_read_configure_again(make_cluster: MakeCluster) -> None:
    """Of a change to anything else they are not told."""
    endpoint, [config] = make_cluster("a").endpoint("a"), configs("a")
    settings = Noted()
    READ.clear()
    endpoint.engine.configure(config, settings)
    endpoint.configure(config, settings)
    numbers = {"engine_priority", "engine_priority_order"}  # read by a feature, where it is installed
    assert set(CONFIGURED_BY) - numbers == READ - numbers
