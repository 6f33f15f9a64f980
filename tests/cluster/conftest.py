"""A cluster on a fake clock, and words to speak about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import composed
from kvproxy.base.types import EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing import registry
from kvproxy.cluster.routing.costs import wait_s
from kvproxy.cluster.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, PolicyName
from tests.support.clock import FakeClock
from tests.support.picks import pick_endpoint

MakeCluster = Callable[..., "Bench"]
#: Name of the policy `Greedy` in tests with the fixture `greedy`.
GREEDY = "power_of_two"


class Greedy(Policy):
    """The least wait; learns speeds as kv_aware does."""

    learns_speeds = True
    reasons = {"least_wait": "its wait is the least"}
    speeds: SpeedModel

    def __init__(self, *, rng: random.Random) -> None:
        super().__init__(rng=rng)
        self.speeds = SpeedModel()

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        waits = [wait_s(one, self.speeds, now) for one in candidates]
        return Choice(waits.index(min(waits)), "least_wait")

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the policy in the place of another one."""
    monkeypatch.setitem(registry.POLICIES, PolicyName(GREEDY), Greedy)  # type: ignore[arg-type]


def configs(*ids: str, **fields: Any) -> tuple[EndpointSettings, ...]:
    """Endpoints on ports of their own, the same for the same id."""
    return tuple(EndpointSettings(id=i, url=f"http://127.0.0.1:{1000 + sum(i.encode())}", **fields) for i in ids)


class Bench:
    """A cluster with its clock and its metrics."""

    def __init__(self, cluster: Cluster, clock: FakeClock, metrics: Metrics) -> None:
        self.cluster = cluster
        self.clock = clock
        self.metrics = metrics

    def pick(self, **request: Any) -> Pick | None:
        """Pick now."""
        return pick_endpoint(self.cluster, PickRequest(**request), now=self.clock())

    def picked(self, **request: Any) -> Pick:
        """Pick now; an endpoint must be there."""
        pick = self.pick(**request)
        assert pick is not None
        return pick

    def endpoint(self, name: str) -> Endpoint:
        """Return a member."""
        endpoint = self.cluster.find_endpoint(EndpointId(name))
        assert endpoint is not None
        return endpoint

    def outcomes(self, name: str, outcome: AttemptOutcome, times: int = 1) -> None:
        """Concurrent requests on one endpoint that end so."""
        picks = [self.picked(preferred=EndpointId(name)) for _ in range(times)]
        for pick in picks:
            assert pick.endpoint.id == name
            pick.settle(outcome, self.clock())

    def ids(self, count: int = 12) -> set[str]:
        """Return the endpoints that get requests now."""
        picks = [self.picked() for _ in range(count)]
        for pick in picks:
            pick.settle(AttemptOutcome.CANCELLED, self.clock())
        return {str(pick.endpoint.id) for pick in picks}

    def sample(self, name: str, **labels: str) -> float | None:
        """Return a metric's value, None when there is no such series."""
        return self.metrics.registry.get_sample_value(name, labels)

    def series(self, endpoint: str) -> list[str]:
        """Names of the series that carry this endpoint."""
        return sorted(
            sample.name
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.labels.get("endpoint") == endpoint or sample.labels.get("breaker") == f"c/{endpoint}"
        )


@pytest.fixture
def make_cluster(clock: FakeClock) -> MakeCluster:
    """Build a cluster named c; keywords are its settings, `with_` those of the constructor."""

    def make(*ids: str, with_: Mapping[str, Any] | None = None, **settings: Any) -> Bench:
        settings.setdefault("policy", PolicyName.ROUND_ROBIN)
        settings.setdefault("endpoints", configs(*ids))
        metrics = Metrics()
        cluster = Cluster(
            "c",
            composed(ClusterSettings)(**settings),
            metrics=metrics,
            clock=clock,
            rng=random.Random(1),
            **(with_ or {}),
        )
        cluster.bind_gauges()
        return Bench(cluster, clock, metrics)

    return make
