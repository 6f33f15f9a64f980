"""A new policy is a file and a line in the registry: everything else asks its class."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from kvproxy.cluster.routing import registry
from kvproxy.cluster.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.settings import PolicyName
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.operate.admin.clusters import describe_routing
from tests.cluster.conftest import MakeCluster


class Newcomer(Policy):
    """The last candidate; learns speeds for the queue's sake."""

    uses_overlap = True
    learns_speeds = True
    reasons = {"newest": "it came last"}

    def __init__(self, *, rng: Random) -> None:
        super().__init__(rng=rng)
        self.speeds = SpeedModel()

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        return Choice(len(candidates) - 1, "newest")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> PolicyName:
    """Under a name that the configuration has."""
    name = PolicyName.POWER_OF_TWO
    monkeypatch.setitem(registry.POLICIES, name, Newcomer)  # type: ignore[arg-type]
    return name


async def test_one_line_in_the_registry_is_all(make_cluster: MakeCluster, registered: PolicyName) -> None:
    """It decides, may be asked for, gets a queue, and is shown."""
    bench = make_cluster("a", "b", policy=registered, queue={})
    assert (bench.picked().endpoint.id, bench.picked().decision.reason) == ("b", "newest")
    assert bench.cluster.queue is not None
    assert describe_routing(bench.cluster, bench.clock())["policy"] == "power_of_two"
    asked = make_cluster("a", "b", client_policies=[registered]).picked(policy="power_of_two")
    assert (asked.decision.policy, asked.decision.reason) == ("power_of_two", "newest")
    assert isinstance(PolicySpec.parse("power_of_two+queue").make(rng=Random(1)), Newcomer)
