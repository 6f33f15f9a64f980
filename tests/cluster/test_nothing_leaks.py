"""Whatever happens in whatever order: when every request is over, nothing is counted any more."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.breaker import BreakerState
from kvproxy.base.settings.model import BreakerSettings
from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.screening import Screening
from kvproxy.cluster.settings import (
    ClusterSettings,
    EndpointSettings,
    HealthCheckSettings,
    PolicyName,
)
from tests.support.clock import FakeClock
from tests.support.examples import examples
from tests.support.picks import pick_endpoint

IDS = ("a", "b", "c", "d")
IDS_OR_NOBODY = st.sampled_from([*IDS, "nobody"]).map(EndpointId)


class ClusterMachine(RuleBasedStateMachine):
    """Random picks, first tokens, outcomes, drains, updates and passing time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.picks: list[Pick] = []
        self.seen: set[Endpoint] = set()
        self.max_in_flight = 0

    @initialize(
        policy=st.sampled_from(["random", "round_robin", "least_request", "power_of_two"]),
        max_in_flight=st.sampled_from([0, 1, 3]),
    )
    def start(self, policy: str, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.metrics = Metrics()
        self.cluster = Cluster(
            "c",
            ClusterSettings(
                policy=PolicyName(policy),
                max_in_flight=max_in_flight,
                health=HealthCheckSettings(eject_after=2, eject_for=5),
                breaker=BreakerSettings(failure_threshold=3, recovery_timeout=5),
            ),
            metrics=self.metrics,
            clock=self.clock,
            rng=random.Random(1),
        )
        self.cluster.bind_gauges()

    @rule(ids=st.lists(st.sampled_from(IDS), unique=True), port=st.sampled_from([1, 2]), weight=st.sampled_from([1, 3]))
    def apply(self, ids: list[str], port: int, weight: int) -> None:
        self.cluster.apply_endpoints(
            [EndpointSettings(id=i, url=f"http://127.0.0.1:{port}", weight=weight) for i in ids]
        )

    @rule(endpoint=IDS_OR_NOBODY, draining=st.booleans())
    def drain(self, endpoint: EndpointId, draining: bool) -> None:
        self.cluster.operator.drain_endpoint(endpoint, draining=draining)

    @rule(
        preferred=st.none() | IDS_OR_NOBODY,
        excluded=st.frozensets(IDS_OR_NOBODY, max_size=2),
        prompt=st.integers(min_value=0, max_value=1000),
        held=st.integers(min_value=0, max_value=2000),
        session=st.sampled_from(["", "s", "t"]),
    )
    def pick(
        self, preferred: EndpointId | None, excluded: frozenset[EndpointId], prompt: int, held: int, session: str
    ) -> None:
        facts = OverlapFacts(prompt, {EndpointId("a"): Overlap(held, ((Tier.HOST, held // 2),))})
        request = PickRequest(preferred=preferred, excluded=excluded, facts=facts, session_key=session)
        now = self.clock()
        healthy = {e for e in self.cluster.endpoints if e.condition(now) is Condition.UP}
        pick = pick_endpoint(self.cluster, request, now=now)
        if pick is None:
            assert not {e for e in healthy if e.id not in excluded}
            return
        assert pick.endpoint.id not in excluded
        assert pick.endpoint in (healthy or self.cluster.endpoints)
        assert (pick.decision.reason == "panic") is (not healthy)
        self.picks.append(pick)

    @precondition(lambda self: self.picks)
    @rule(data=st.data(), outcome=st.sampled_from(AttemptOutcome), twice=st.booleans())
    def settle(self, data: st.DataObject, outcome: AttemptOutcome, twice: bool) -> None:
        pick = data.draw(st.sampled_from(self.picks))
        pick.settle(outcome, self.clock())
        if not twice:
            self.picks.remove(pick)

    @precondition(lambda self: self.picks)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.picks)).first_token(self.clock())

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def counts_are_those_of_running_requests(self) -> None:
        running = [pick for pick in self.picks if not pick.reservation.released]
        for endpoint in {*self.cluster.endpoints, *(pick.endpoint for pick in self.picks)}:
            here = [pick.reservation for pick in running if pick.endpoint is endpoint]
            load = endpoint.load
            assert load.in_flight == len(here)
            assert load.pending_tokens == sum(r.uncached_tokens for r in here if r.first_token_at is None)
            assert load.resident_tokens == sum(r.uncached_tokens + r.cached_tokens for r in here)
            assert self.max_in_flight == 0 or load.in_flight <= self.max_in_flight

    @invariant()
    def what_changed_was_screened_again(self) -> None:
        now = self.clock()
        fresh = Screening()
        fresh.screen_endpoints(self.cluster.endpoints)
        pool = self.cluster.screening.find_pool("", now)
        assert fresh.find_pool("", now) == pool

    @invariant()
    def leaving_endpoints_have_requests(self) -> None:
        for endpoint in self.cluster.members.departures.endpoints:
            assert endpoint.load.in_flight > 0
        shown = {
            sample.labels["endpoint"]
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if "endpoint" in sample.labels
        }
        assert shown <= {e.id for e in (*self.cluster.endpoints, *self.cluster.members.departures.endpoints)}

    def teardown(self) -> None:
        for pick in self.picks:
            pick.settle(AttemptOutcome.CANCELLED, self.clock())
        for endpoint in self.cluster.endpoints:
            assert (endpoint.load.in_flight, endpoint.load.pending_tokens, endpoint.load.resident_tokens) == (0, 0, 0)
            if endpoint.breaker.state is BreakerState.HALF_OPEN:
                assert endpoint.breaker.admits
        assert self.cluster.members.departures.endpoints == []


TestNothingLeaks = ClusterMachine.TestCase
TestNothingLeaks.settings = settings(max_examples=examples(60), stateful_step_count=40)
