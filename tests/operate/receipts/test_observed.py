"""Records of a decision are bounded, whatever the cluster's size."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.policy import OverlapFacts, PickRequest
from kvproxy.cluster.screening import Refusal
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, PolicyName
from kvproxy.operate.receipts.observed import MAX_ATTEMPTS, MAX_CANDIDATES, AttemptLog
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from tests.support.clock import FakeClock
from tests.support.picks import pick_endpoint


def cluster(clock: FakeClock, count: int, policy: str) -> Cluster:
    """So many endpoints."""
    endpoints = tuple(EndpointSettings(id=f"e{n}", url=f"http://127.0.0.1:{1000 + n}") for n in range(count))
    settings = ClusterSettings(policy=PolicyName(policy), endpoints=endpoints)
    return Cluster("c", settings, metrics=Metrics(), clock=clock, rng=random.Random(1))


class Told:
    """Decisions of a cluster that reach the observers of an exchange."""

    def __init__(self, *observers: RequestObserver) -> None:
        self.exchange = Exchange(received_at=0.0)
        self.exchange.attach(*observers)

    def pick(self, pool: Cluster, now: float, **request: Any) -> Pick | None:
        """Decide, tell, reserve."""
        decision = pool.decide(PickRequest(**request), now)
        if isinstance(decision, Refusal):
            notify(RequestObserver.refused, self.exchange, decision.value, now)
            return None
        notify(RequestObserver.placed, self.exchange, decision, now)
        return pool.reserve(decision, now)

    def failed(self, reason: str) -> None:
        notify(RequestObserver.attempt_failed, self.exchange, reason, 0.0)


@pytest.mark.parametrize("policy", ["round_robin", "kv_aware"])
def test_of_many_candidates_the_chosen_and_the_cheapest_are_noted(clock: FakeClock, policy: str) -> None:
    """And how many were left out."""
    pool, observed = cluster(clock, MAX_CANDIDATES + 10, policy), AttemptLog()
    facts = OverlapFacts(1000)
    for _ in range(MAX_CANDIDATES + 5):
        observed = AttemptLog()
        assert Told(observed).pick(pool, clock(), facts=facts) is not None
    (placed,) = observed.decisions
    assert len(placed.candidates) == MAX_CANDIDATES
    assert placed.left_out == 10
    assert placed.endpoint in [one.id for one in placed.candidates]


def test_attempts_are_bounded(clock: FakeClock) -> None:
    """A retry loop must not grow a receipt without end."""
    pool, observed = cluster(clock, 1, "round_robin"), AttemptLog()
    for _ in range(MAX_ATTEMPTS + 3):
        pick = Told(observed).pick(pool, clock())
        assert pick is not None
        Told(observed).failed("connect_error")
        pick.settle(AttemptOutcome.BUSY, clock())
        Told(observed).pick(pool, clock(), excluded=frozenset({pick.endpoint.id}))
    assert len(observed.decisions) == len(observed.refusals) == MAX_ATTEMPTS
    assert all(one.failure == "connect_error" for one in observed.decisions)


def test_loads_are_those_before_the_reservation(clock: FakeClock) -> None:
    """The decision was made without the request's own load."""
    pool, observed = cluster(clock, 1, "kv_aware"), AttemptLog()
    pick_endpoint(pool, PickRequest(facts=OverlapFacts(300)), clock())
    clock.advance(0.01)
    Told(observed).pick(pool, clock(), facts=OverlapFacts(700))
    (candidate,) = observed.decisions[0].candidates
    assert (candidate.in_flight, candidate.pending_requests, candidate.pending_tokens) == (1, 1, 300)
    assert candidate.work[1] == candidate.head[1] == 300
    assert candidate.elapsed_s == pytest.approx(0.01)


def test_live_blocks_are_noted_where_they_are_counted(clock: FakeClock) -> None:
    """Those in flight, and how many of this prompt's are among them; nothing where no policy asks."""
    facts = OverlapFacts(64, blocks=array("Q", (1, 2, 3)), block_tokens=16.0)
    for policy, noted in (("dynamo", (3, 2)), ("kv_aware", (None, 0))):
        pool, observed = cluster(clock, 1, policy), AttemptLog()
        pick_endpoint(pool, PickRequest(facts=facts), clock())
        Told(observed).pick(pool, clock(), facts=OverlapFacts(64, blocks=array("Q", (1, 2, 9)), block_tokens=16.0))
        (candidate,) = observed.decisions[0].candidates
        assert (candidate.live_blocks, candidate.shared_blocks) == noted


def test_the_cost_of_an_adapter_is_recorded(clock: FakeClock) -> None:
    """By endpoint, for requests that ask for one."""
    pool = cluster(clock, 2, "kv_aware")
    engine = pool.engines[0]
    pool.adapters.observe_list(str(engine.id), engine.adapters, listed=["x"])
    for model, noted in (("x", [0.2]), ("base", [None, None])):
        observed = AttemptLog()
        Told(observed).pick(pool, clock(), model=model)
        assert [one.adapter_s for one in observed.decisions[0].candidates] == noted


def test_a_failure_before_any_placement_is_nobodys(clock: FakeClock) -> None:
    """Nothing to note, nothing raised."""
    observed = AttemptLog()
    Told(observed).failed("connect_error")
    assert observed.decisions == []


def test_a_decision_that_cannot_be_noted_harms_no_request(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """It is missing on the receipt, and that is said."""
    pool, observed = cluster(clock, 2, "round_robin"), AttemptLog()
    decision = pool.decide(PickRequest(), clock())
    assert not isinstance(decision, Refusal)
    cannot_be_noted = msgspec.structs.replace(decision, speeds=SimpleNamespace())  # type: ignore[arg-type]
    notify(RequestObserver.placed, Told(observed).exchange, cannot_be_noted, clock())
    assert observed.decisions == []
    assert "an observer of requests failed: AttemptLog at `placed`" in caplog.text
