"""Which requests carry the number, what it is made of, and when an engine is told none."""

from __future__ import annotations

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EndpointLoad, EngineState
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.waiting_lines import LEVEL_S
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, EnginePriorityMode
from kvproxy.features.priority.engine_priority import EndpointPriority, PriorityState
from kvproxy.features.priority.urgency import EPOCH_S, UrgencyScale
from tests.cluster.conftest import MakeCluster
from tests.features.priority.support import known_of

A = EndpointId("a")
AUTO, ON, OFF = EnginePriorityMode.AUTO, EnginePriorityMode.ON, EnginePriorityMode.OFF


def engine(mode: EnginePriorityMode, load: EndpointLoad | None = None) -> EndpointPriority:
    """One that nothing is known of."""
    settings = ClusterSettings(engine_priority=mode)
    load = EndpointLoad() if load is None else load
    endpoint = EndpointSettings(id="a", url="http://a")
    return EndpointPriority(endpoint, settings, load=load)


@pytest.mark.parametrize(
    ("waiting", "age_s", "sends"), [(2, 59.0, True), (2, 61.0, False), (1, 1.0, False), (0, 1.0, False)]
)
def test_auto_sends_only_where_several_wait_in_the_engine(waiting: int, age_s: float, sends: bool) -> None:
    """By its own count of late: what does not wait cannot be ordered, and long prompts would pay for nothing."""
    load = EndpointLoad()
    load.engine = EngineState(1000.0, waiting=waiting)
    assert engine(AUTO, load).sends(1000.0 + age_s) is sends
    assert engine(ON, load).sends(1000.0 + age_s)
    assert not engine(OFF, load).sends(1000.0 + age_s)


@pytest.mark.parametrize("state", [None, EngineState(1000.0, running=3)])
def test_an_engine_that_does_not_tell_is_sent_it_by_auto(state: EngineState | None) -> None:
    """Nothing says that nothing waits there."""
    load = EndpointLoad()
    load.engine = state
    assert engine(AUTO, load).sends(1001.0)


def test_a_lull_does_not_switch_it_off_at_once() -> None:
    """A reading with several waiting stands for a minute, also when later ones have none."""
    load = EndpointLoad()
    told = engine(AUTO, load)
    load.engine = EngineState(1000.0, waiting=5)
    assert told.sends(1001.0)
    load.engine = EngineState(1005.0, waiting=0)
    assert told.sends(1050.0)
    assert not told.sends(1061.0)


def test_a_refusal_stands_until_the_engine_restarts() -> None:
    """Whatever the operator said: the request would fail."""
    told = engine(ON)
    told.record_refusal()
    assert not told.sends(0.0)
    assert told.state is PriorityState.REFUSED
    told.process_replaced()
    assert told.sends(0.0)
    assert told.state is PriorityState.ACCEPTED


def test_the_urgency_is_prefill_arrival_and_class() -> None:
    """At the learned speed, of what is not cached there; it came before the proxy's clock says now."""
    speeds = SpeedModel()
    told = UrgencyScale(speeds=lambda: speeds, wall_clock=lambda: EPOCH_S + 2000.0)
    facts = OverlapFacts(8000, {A: Overlap(6000)})

    def urgency(**fields: object) -> float:
        return told.urgency_s(facts, A, **{"received_at": 500.0, "now": 500.0, **fields})  # type: ignore[arg-type]

    request_s, token_s, attention_s, _ = speeds.seconds
    own_s = request_s + 2000 * (token_s + attention_s * (6000 + 1000))
    assert urgency() == pytest.approx(600.0 + own_s)
    assert urgency(received_at=490.0) == pytest.approx(600.0 - 3.0 + own_s)
    assert urgency(level=2) == pytest.approx(600.0 + own_s - 2 * LEVEL_S)


def test_without_learned_speeds_arrival_and_class_are_left() -> None:
    """A policy that learns none is refused at the start; a reload may still leave a moment without."""
    told = UrgencyScale(speeds=lambda: None, wall_clock=lambda: EPOCH_S + 10.0)
    assert told.urgency_s(OverlapFacts(8000), A, received_at=0.0, now=0.0) == pytest.approx(3.0)


def test_a_reload_turns_it_on_and_off_and_keeps_what_is_known(make_cluster: MakeCluster) -> None:
    """An engine found to refuse it does so under any configuration."""
    bench = make_cluster("a", engine_priority=ON)
    cluster = bench.cluster
    assert cluster.addition is not None
    cluster.addition.record_refusal(cluster.endpoints[0])
    labels = {"cluster": "c", "endpoint": "a"}
    assert bench.sample("kvproxy_engine_priority_state", **labels, state="refused") == 1.0
    assert bench.sample("kvproxy_engine_priority_requests_total", **labels, outcome="refused") == 1.0
    settings = cluster.settings.model_copy(update={"engine_priority": OFF})
    cluster.reconfigure(settings, probe=None)
    assert cluster.addition is None
    assert bench.sample("kvproxy_engine_priority_state", **labels, state="refused") == 0.0
    assert cluster.endpoints[0].status(0.0)["engine_priority"] is None
    cluster.reconfigure(settings.model_copy(update={"engine_priority": AUTO}), probe=None)
    assert cluster.addition is not None
    assert known_of(cluster.endpoints[0]).state is PriorityState.REFUSED


def test_where_it_is_off_there_are_no_series(make_cluster: MakeCluster) -> None:
    """Of engines that are told nothing there is nothing to say."""
    bench = make_cluster("a")
    assert bench.sample("kvproxy_engine_priority_state", cluster="c", endpoint="a", state="accepted") is None
