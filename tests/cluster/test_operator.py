"""Endpoints that an operator adds and removes while the proxy runs, against those of the sources."""

from __future__ import annotations

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.membership import OPERATOR
from kvproxy.cluster.operator import MAX_ADDED
from kvproxy.cluster.settings import EndpointSettings
from tests.cluster.conftest import MakeCluster, configs

A, B, Z = EndpointId("a"), EndpointId("b"), EndpointId("z")


def names(cluster: object) -> list[str]:
    return [endpoint.id for endpoint in cluster.endpoints]  # type: ignore[attr-defined]


def test_an_added_endpoint_serves_and_outlives_updates(make_cluster: MakeCluster) -> None:
    """It comes last, and the sources' updates leave it alone."""
    bench = make_cluster("a")
    assert bench.cluster.operator.add_endpoint(*configs("z"))
    assert bench.ids() == {"a", "z"}
    bench.cluster.apply_endpoints(configs("b", "c"))
    assert names(bench.cluster) == ["b", "c", "z"]


def test_a_dismissed_endpoint_stays_out_whatever_its_source_says(make_cluster: MakeCluster) -> None:
    """Requests in flight finish; adding it again, at another address even, brings it back."""
    bench = make_cluster("a", "b")
    running = bench.picked(preferred=A)
    assert bench.cluster.operator.remove_endpoint(A)
    bench.cluster.apply_endpoints(configs("a", "b"))
    assert bench.ids() == {"b"}
    assert bench.cluster.members.departures.endpoints == [running.endpoint]
    assert bench.cluster.operator.add_endpoint(EndpointSettings(id="a", url="http://127.0.0.1:9"))
    assert names(bench.cluster) == ["a", "b"]
    assert str(bench.endpoint("a").origin) == "http://127.0.0.1:9"


def test_a_dismissal_ends_with_the_last_source_that_names_it(make_cluster: MakeCluster) -> None:
    """So that the list of the dismissed cannot grow, and an id may be used again."""
    bench = make_cluster("a", "b")
    bench.cluster.operator.remove_endpoint(A)
    bench.cluster.apply_endpoints(configs("b"))
    bench.cluster.apply_endpoints(configs("a", "b"))
    assert names(bench.cluster) == ["a", "b"]


def test_an_added_endpoint_can_be_dismissed(make_cluster: MakeCluster) -> None:
    """It is gone for good; an unknown one is an error that says so."""
    bench = make_cluster("a")
    bench.cluster.operator.add_endpoint(*configs("z"))
    assert bench.cluster.operator.remove_endpoint(Z)
    assert names(bench.cluster) == ["a"]
    assert not bench.cluster.operator.remove_endpoint(Z)


def test_the_last_endpoint_may_go(make_cluster: MakeCluster) -> None:
    """An operator knows best; requests are refused with the reason."""
    bench = make_cluster("a")
    assert bench.cluster.operator.remove_endpoint(A)
    assert bench.pick() is None


def test_a_bad_address_changes_nothing(make_cluster: MakeCluster) -> None:
    """As with every other source."""
    bench = make_cluster("a")
    with pytest.raises(ValueError, match="http"):
        bench.cluster.operator.add_endpoint(EndpointSettings(id="z", url="nonsense"))
    assert names(bench.cluster) == ["a"]


def test_additions_are_bounded(make_cluster: MakeCluster) -> None:
    """A client of the admin listener cannot fill the memory; replacing an addition takes no further place."""
    bench = make_cluster("a")
    added = configs(*(f"x{number}" for number in range(MAX_ADDED)))
    bench.cluster.members.apply_source(OPERATOR, added)
    assert not bench.cluster.operator.add_endpoint(*configs("z"))
    assert bench.cluster.operator.add_endpoint(*configs("x1"))
