"""When retries are of no use, and when a failure says nothing about an endpoint."""

from __future__ import annotations

import logging

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Condition
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.cluster.settings import HealthCheckSettings
from tests.cluster.conftest import Bench, MakeCluster, configs


def fail(bench: Bench, *names: str, times: int = 1, outcome: AttemptOutcome = AttemptOutcome.UNPROVEN) -> None:
    for name in names:
        bench.outcomes(name, outcome, times)


def test_an_outage_is_when_every_endpoint_failed_of_late(make_cluster: MakeCluster) -> None:
    """Four attempts without an answer, one at least on each; "busy" counts, one success ends it, a minute does too."""
    bench = make_cluster("a", "b", "c")
    fail(bench, "a", times=8)
    assert not bench.cluster.verdicts.has_outage("", bench.clock())
    fail(bench, "b", outcome=AttemptOutcome.BUSY)
    assert not bench.cluster.verdicts.has_outage("", bench.clock())
    fail(bench, "c")
    assert bench.cluster.verdicts.has_outage("", bench.clock())
    bench.clock.advance(59.0)
    assert bench.cluster.verdicts.has_outage("", bench.clock())
    bench.clock.advance(2.0)
    assert not bench.cluster.verdicts.has_outage("", bench.clock())
    fail(bench, "a", "b", "c", times=2)
    assert bench.cluster.verdicts.has_outage("", bench.clock())
    bench.outcomes("b", AttemptOutcome.CLIENT_ERROR)
    assert not bench.cluster.verdicts.has_outage("", bench.clock())


def test_an_outage_of_one_model_is_none_of_another(make_cluster: MakeCluster) -> None:
    """Endpoints are counted by what they serve."""
    endpoints = (*configs("a", models=("m",)), *configs("b", models=("n",)))
    bench = make_cluster(endpoints=endpoints)
    fail(bench, "a", times=6)
    assert bench.cluster.verdicts.has_outage("m", bench.clock())
    assert not bench.cluster.verdicts.has_outage("n", bench.clock())


def test_verdicts_on_every_endpoint_are_an_outage(make_cluster: MakeCluster) -> None:
    """But a cluster that is full is none."""
    bench = make_cluster("a", health=HealthCheckSettings(eject_after=1), max_in_flight=1)
    assert bench.cluster.screening.may_serve("", bench.clock())
    busy = bench.picked()
    assert not bench.cluster.screening.may_serve("", bench.clock())
    assert not bench.cluster.verdicts.has_outage("", bench.clock())
    busy.settle(AttemptOutcome.FAILURE, bench.clock())
    assert bench.endpoint("a").condition(bench.clock()) is Condition.EJECTED
    assert bench.cluster.verdicts.has_outage("", bench.clock())
    assert not bench.cluster.screening.may_serve("", bench.clock())


def test_a_failure_is_spared_while_no_other_endpoint_does_better(make_cluster: MakeCluster) -> None:
    """Or while requests are about that fail in this way everywhere."""
    bench = make_cluster("a", "b")
    a = bench.endpoint("a")
    assert not bench.cluster.verdicts.is_spared(a, "", reason="status_500", client="", now=bench.clock())
    bench.cluster.verdicts.record_shared_failure("status_500", bench.clock())
    assert bench.cluster.verdicts.is_spared(a, "", reason="status_500", client="", now=bench.clock())
    assert not bench.cluster.verdicts.is_spared(a, "", reason="status_502", client="", now=bench.clock())
    bench.clock.advance(10.0)
    assert not bench.cluster.verdicts.is_spared(a, "", reason="status_500", client="", now=bench.clock())
    fail(bench, "b")
    assert bench.cluster.verdicts.is_spared(a, "", reason="status_500", client="", now=bench.clock())


def test_the_only_endpoint_is_not_spared(make_cluster: MakeCluster) -> None:
    """There is nothing to compare it with."""
    bench = make_cluster("a")
    assert not bench.cluster.verdicts.is_spared(
        bench.endpoint("a"), "", reason="status_500", client="", now=bench.clock()
    )


def test_a_suspended_attempt_is_no_load_and_no_failure_until_it_is_blamed(make_cluster: MakeCluster) -> None:
    """The breaker's probe slot and the verdict wait for the end of the request."""
    bench = make_cluster("a", "b", health=HealthCheckSettings(eject_after=1))
    pick = bench.picked(preferred=EndpointId("a"))
    pick.suspend(bench.clock())
    a = bench.endpoint("a")
    assert (a.load.in_flight, a.health.failures, a.breaker.failures) == (0, 0, 0)
    pick.blame(AttemptOutcome.FAILURE, bench.clock())
    assert (a.condition(bench.clock()), a.breaker.failures) == (Condition.EJECTED, 1)


def test_a_probe_that_is_well_again_forgets_the_failures_before(make_cluster: MakeCluster) -> None:
    """A restarted engine starts with a clean sheet."""
    bench = make_cluster("a")
    fail(bench, "a", times=6)
    health = bench.endpoint("a").health
    health.record_probe(False, bench.clock())
    health.record_probe(True, bench.clock())
    assert health.unserved_in_a_row(bench.clock()) == 0


def test_the_end_of_all_engines_is_logged_once(make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """One ERROR when the last one goes, one INFO when the first is back, nothing for what lies between."""
    bench = make_cluster("a", "b")
    verdicts = bench.cluster.verdicts

    def probe(name: str, outcome: ProbeOutcome) -> None:
        for _ in range(5):
            verdicts.record_probe(bench.endpoint(name).engine, outcome)

    def logged(level: int) -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno == level and "engine " in one.getMessage()]

    with caplog.at_level(logging.INFO, logger="kvproxy.cluster.verdicts"):
        probe("a", ProbeOutcome.UNREACHABLE)
        assert not logged(logging.ERROR)
        probe("b", ProbeOutcome.UNREACHABLE)
        [gone] = logged(logging.ERROR)
        assert "(2 down)" in gone
        probe("a", ProbeOutcome.UNREACHABLE)
        probe("b", ProbeOutcome.OK)
        probe("a", ProbeOutcome.OK)
        assert len(logged(logging.ERROR)) == 1
        assert next(one for one in logged(logging.INFO) if "again" in one).endswith("has an engine again: b")
        assert len([one for one in logged(logging.INFO) if "has an engine" in one]) == 1
