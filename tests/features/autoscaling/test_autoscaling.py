"""How loaded a cluster is, for whatever scales it."""

from __future__ import annotations

import pytest

from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.work import features_of, seconds_of
from kvproxy.cluster.settings import PolicyName
from kvproxy.features.autoscaling.scaling import Autoscaling
from kvproxy.features.autoscaling.settings import AutoscalingSettings
from tests.cluster.conftest import Bench, MakeCluster


def scaling_of(bench: Bench) -> Autoscaling:
    """Return the feature's observer of the cluster."""
    (found,) = [one for one in bench.cluster.observers if isinstance(one, Autoscaling)]
    return found


def waiting_s(bench: Bench, tokens: int) -> float:
    """Prefill seconds of a prompt that no endpoint holds."""
    speeds = bench.cluster.speeds
    assert speeds is not None
    return seconds_of(features_of(tokens, 0), speeds.seconds)


@pytest.mark.parametrize("wanted_wait", [0.25, 4.0])
def test_saturation_is_what_waits_by_what_may(make_cluster: MakeCluster, wanted_wait: float) -> None:
    """In shares of the wanted wait, an endpoint: 1 is what was wanted, whatever that is."""
    scaling = AutoscalingSettings(wanted_wait=wanted_wait)
    bench = make_cluster("a", "b", policy=PolicyName.KV_AWARE, autoscaling=scaling)
    assert scaling_of(bench).saturation(bench.clock()) == 0.0
    bench.picked(facts=OverlapFacts(40_000, {}))
    expected = waiting_s(bench, 40_000) / 2 / wanted_wait
    assert scaling_of(bench).saturation(bench.clock()) == pytest.approx(expected)


def test_without_speeds_nothing_is_said(make_cluster: MakeCluster) -> None:
    """A policy that learns none knows of no seconds."""
    bench = make_cluster("a")
    bench.picked()
    assert scaling_of(bench).saturation(bench.clock()) is None
    assert scaling_of(bench).wanted_endpoints(bench.clock()) is None
