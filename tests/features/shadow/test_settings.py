"""The shadow over a reload, and as a reason to gather facts."""

from __future__ import annotations

import pytest

from kvproxy.base.settings.compose import composed
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.routing.kv_aware import KvAware
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.proxy.filters.kvcache import needs_facts
from tests.cluster.conftest import MakeCluster
from tests.cluster.test_reconfigure import reconfigure, taught
from tests.features.shadow.test_shadow import shadow_of


@pytest.mark.parametrize(("policy", "needed"), [("kv_aware", True), ("random", False), (None, False)])
def test_a_shadow_that_weighs_what_endpoints_hold_needs_facts(policy: str | None, needed: bool) -> None:
    """Also where the policy that decides weighs none."""
    chosen = composed(ClusterSettings).model_validate({"policy": "round_robin", "shadow_policy": policy})
    assert needs_facts(KvCacheSettings(), chosen) is needed


def test_live_blocks_are_counted_while_the_shadow_asks_for_them(make_cluster: MakeCluster) -> None:
    """Nothing is held before and after."""
    bench = make_cluster("a")
    facts = OverlapFacts(64, blocks=(1, 2, 3, 4), block_tokens=16.0)
    assert bench.endpoint("a").load.live is None
    reconfigure(bench, shadow_policy="dynamo")
    bench.picked(facts=facts)
    assert bench.endpoint("a").load.live is not None
    assert len(bench.endpoint("a").load.live) == 4
    reconfigure(bench, shadow_policy=None)
    assert bench.endpoint("a").load.live is None


def test_the_shadows_learning_goes_to_the_policy_that_takes_over(make_cluster: MakeCluster) -> None:
    """Tried in the shadow, then used; the other way round as well, and each learns on by itself."""
    bench = make_cluster("a", "b", shadow_policy=PolicyName.KV_AWARE)
    taught(bench)
    reconfigure(bench, policy="kv_aware", shadow_policy="least_ttft")
    shade = shadow_of(bench)
    assert isinstance(bench.cluster.policies.own.policy, KvAware)
    assert shade is not None
    taught(bench)
    live, watching = bench.cluster.policies.own.policy.speeds, shade.policy.speeds
    assert live is not None
    assert watching is not None
    assert [one.estimates(bench.clock()).samples for one in (live, watching)] == [2, 2]
    assert live is not watching
    reconfigure(bench, shadow_policy=None)
    assert shadow_of(bench) is None
