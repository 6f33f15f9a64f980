"""Roles of endpoints: which take whole requests, and which prefill for others."""

from __future__ import annotations

from kvproxy.base.types import EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.screening import Refusal
from tests.cluster.conftest import Bench, MakeCluster, configs


def with_roles(make_cluster: MakeCluster, **roles: str) -> Bench:
    """Return a cluster with an endpoint for each."""
    bench: Bench = make_cluster(**{"health": {"eject_after": 1, "max_ejected": 1.0}})
    bench.cluster.apply_endpoints([one for name, role in roles.items() for one in configs(name, role=role)])
    return bench


def prefillers(cluster: Cluster, now: float) -> set[str]:
    return {str(one.id) for one in cluster.screening.find_prefillers("", now)}


def test_no_whole_request_goes_to_an_endpoint_that_prefills_for_others(make_cluster: MakeCluster) -> None:
    """Not even if it is preferred."""
    bench = with_roles(make_cluster, p="prefill", d="decode", both="both")
    assert bench.ids(50) == {"d", "both"}
    pick = bench.picked(preferred=EndpointId("p"))
    assert pick.endpoint.id != "p"
    assert pick.decision.preference == "unknown"


def test_an_endpoint_that_decodes_prefills_for_no_other(make_cluster: MakeCluster) -> None:
    """All others do, while they are well."""
    bench = with_roles(make_cluster, p="prefill", d="decode", both="both")
    assert prefillers(bench.cluster, bench.clock()) == {"p", "both"}
    bench.outcomes("both", AttemptOutcome.FAILURE)
    assert prefillers(bench.cluster, bench.clock()) == {"p"}


def test_endpoints_that_prefill_alone_are_none_for_requests(make_cluster: MakeCluster) -> None:
    """Panic does not make them candidates either."""
    bench = with_roles(make_cluster, p="prefill")
    assert bench.cluster.decide(PickRequest(), bench.clock()) is Refusal.MODEL_NOT_SERVED
    bench = with_roles(make_cluster, p="prefill", d="decode")
    bench.outcomes("d", AttemptOutcome.FAILURE)
    assert bench.ids() == {"d"}


def test_a_changed_role_counts_at_once(make_cluster: MakeCluster) -> None:
    """The endpoint stays the same."""
    bench = with_roles(make_cluster, a="both", b="both")
    before = bench.endpoint("a")
    bench.cluster.apply_endpoints([*configs("a", role="prefill"), *configs("b")])
    assert bench.endpoint("a") is before
    assert bench.ids() == {"b"}
