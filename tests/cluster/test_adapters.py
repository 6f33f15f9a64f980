"""LoRA adapters: which engine is asked for which, and what it costs to place one."""

from __future__ import annotations

import random

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import LoraUse
from kvproxy.cluster import adapters as module
from kvproxy.cluster.adapters import Adapters, AdapterState, KnownAdapters, LoadTimes
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routes import Routes
from kvproxy.cluster.routing.policy import OverlapFacts, PickRequest
from kvproxy.cluster.screening import Refusal
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.operate.config.load import load_config
from tests.support.clock import FakeClock
from tests.support.picks import pick_endpoint

A, B = EndpointId("a"), EndpointId("b")


def use(slots: int, *running: str, waiting: tuple[str, ...] = ()) -> LoraUse:
    return LoraUse(slots, frozenset(running), frozenset(waiting))


@pytest.fixture
def engine() -> Adapters:
    return Adapters({"x": 1, "y": 1, "z": 1})


@pytest.mark.parametrize(
    ("told", "state"),
    [
        (None, AdapterState.ROOM),
        (use(2, "y"), AdapterState.ROOM),
        (use(2, "y", "x"), AdapterState.RUNNING),
        (use(2, "y", "z"), AdapterState.FULL),
        (use(2, "y", "z", waiting=("x",)), AdapterState.WAITING),
        (use(2, "x", waiting=("x",)), AdapterState.RUNNING),
    ],
)
def test_reports_of_the_engine(engine: Adapters, told: LoraUse | None, state: AdapterState) -> None:
    engine.use = told
    assert engine.state("x") is state


def test_placements_since_the_report(engine: Adapters) -> None:
    """A burst sees its own requests at once; a slot stays loaded until another adapter takes it."""
    engine.use = use(2)
    engine.begin_request("x")
    engine.begin_request("x")
    engine.begin_request("y")
    assert [engine.state(name) for name in "xyz"] == [AdapterState.RUNNING, AdapterState.RUNNING, AdapterState.FULL]
    engine.end_request("x")
    assert engine.state("z") is AdapterState.FULL
    engine.end_request("x")
    assert [engine.state(name) for name in "xyz"] == [AdapterState.RUNNING, AdapterState.RUNNING, AdapterState.ROOM]
    engine.begin_request("z")
    assert engine.state("x") is AdapterState.FULL
    engine.end_request("y")
    engine.end_request("z")
    assert engine.state("x") is AdapterState.ROOM
    engine.forget_loaded()
    assert [engine.state(name) for name in "xyz"] == [AdapterState.ROOM] * 3


def test_load_times_are_learned_by_state() -> None:
    """Against what is usual where the adapter is loaded; far-off values count for a minute at most."""
    times = LoadTimes()
    prior = [times.expected_s(state) for state in AdapterState]
    assert prior == sorted(prior)
    assert prior[0] == 0.0 < prior[1]
    for _ in range(100):
        times.observe_wait(AdapterState.ROOM, 3.0)
        times.observe_wait(AdapterState.RUNNING, 0.5)
        times.observe_wait(AdapterState.FULL, 1e9)
        times.observe_wait(AdapterState.WAITING, -5.0)
    assert times.expected_s(AdapterState.ROOM) == pytest.approx(2.5, abs=0.05)
    assert times.expected_s(AdapterState.RUNNING) == 0.0
    assert times.expected_s(AdapterState.FULL) == pytest.approx(59.5, abs=0.1)
    assert times.expected_s(AdapterState.WAITING) == 0.0


def test_names_of_engines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    known, changes = KnownAdapters("c", on_change=lambda: changes.append(1)), list[int]()
    one = Adapters(known.names)
    known.observe_list("e", one, listed=["x", "y", "z", "", "n" * 500])
    assert one.names == {"x", "y"}
    known.observe_list("e", one, listed=["x", "y", "z"])
    assert changes == [1]


class World:
    """A cluster of two engines whose adapters a test lists."""

    def __init__(self, *, policy: str = "kv_aware", models: tuple[str, ...] = ()) -> None:
        self.clock = FakeClock()
        endpoints = tuple(EndpointSettings(id=str(one), url=f"http://{one}:1", models=models) for one in (A, B))
        settings = ClusterSettings.model_validate({"endpoints": endpoints, "policy": policy})
        self.cluster = Cluster("c", settings, metrics=Metrics(), clock=self.clock, rng=random.Random(1))

    def list(self, endpoint: EndpointId, *names: str) -> None:
        engine = self.engine(endpoint)
        self.cluster.adapters.observe_list(str(endpoint), engine, listed=names)

    def engine(self, endpoint: EndpointId) -> Adapters:
        found = self.cluster.find_endpoint(endpoint)
        assert found is not None
        return found.engine.adapters

    def pick(self, model: str, **request: object) -> str:
        picked = pick_endpoint(self.cluster, PickRequest(model=model, **request), self.clock())  # type: ignore[arg-type]
        return "" if picked is None else str(picked.endpoint.id)

    def candidates(self, model: str) -> set[str]:
        decision = self.cluster.decide(PickRequest(model=model), self.clock())
        return set() if isinstance(decision, Refusal) else {str(one.id) for one in decision.candidates}


def test_an_adapter_goes_where_it_is_listed() -> None:
    world = World()
    world.list(A, "x", "y")
    world.list(B, "y")
    assert [world.candidates(model) for model in ("x", "y", "base", "")] == [{"a"}, {"a", "b"}, {"a", "b"}, {"a", "b"}]


def test_an_adapter_that_none_lists_goes_where_its_base_may_be() -> None:
    """To endpoints that name no models: an engine may load it for the first request."""
    assert World().candidates("new") == {"a", "b"}
    assert World(models=("base",)).candidates("new") == set()


def test_listed_adapters_are_served_beside_configured_models() -> None:
    world = World(models=("base",))
    world.list(B, "x")
    assert (world.candidates("base"), world.candidates("x")) == ({"a", "b"}, {"b"})
    assert world.cluster.screening.declared == {"base"}
    assert world.cluster.screening.named == {"base", "x"}


def test_an_adapter_that_was_unloaded_is_asked_for_no_more() -> None:
    """By a refusal, by the next list, or because the engine left."""
    world = World()
    for endpoint in (A, B):
        world.list(endpoint, "x")
    world.cluster.adapters.record_missing("a", world.engine(A), "x")
    assert world.candidates("x") == {"b"}
    world.cluster.adapters.record_missing("a", world.engine(A), "x")
    world.list(A, "x")
    assert world.candidates("x") == {"a", "b"}
    world.list(B)
    assert world.candidates("x") == {"a"}
    world.cluster.operator.remove_endpoint(A)
    assert world.cluster.adapters.names == {}
    assert world.candidates("x") == {"b"}


def test_routes_lead_to_the_cluster_that_has_the_adapter() -> None:
    clusters = {name: World(models=(name,)).cluster for name in ("one", "two")}
    endpoints = {name: [{"id": "a", "url": "http://127.0.0.1:9", "models": [name]}] for name in clusters}
    config = load_config({"clusters": {name: {"endpoints": some} for name, some in endpoints.items()}})
    routes = Routes.from_settings(config.routes, clusters)
    engine = clusters["two"].engines[0].adapters
    clusters["two"].adapters.observe_list("a", engine, listed=["x"])
    target = routes.resolve("/v1/chat/completions", "x")
    assert target is not None
    assert target.cluster is clusters["two"]


def test_a_placement_is_priced_by_how_the_engine_stands() -> None:
    """Requests go where the adapter is loaded, and to a free slot before a full engine."""
    world = World()
    for endpoint in (A, B):
        world.list(endpoint, "x", "y", "z")
        world.engine(endpoint).use = use(1)
    first = world.pick("x")
    assert [world.pick("x") for _ in range(3)] == [first] * 3
    other = world.pick("y")
    assert other != first
    assert [world.pick("y"), world.pick("x")] == [other, first]


def test_load_outweighs_the_price_in_the_end() -> None:
    """It is seconds among seconds: a long queue costs more than to load the adapter elsewhere."""
    world = World()
    for endpoint in (A, B):
        world.list(endpoint, "x")
        world.engine(endpoint).use = use(1)
    placed = {world.pick("x", facts=OverlapFacts(8000)) for _ in range(4)}
    assert placed == {"a", "b"}


def test_a_model_that_is_no_adapter_costs_nothing_more() -> None:
    world = World()
    world.list(A, "x")
    decision = world.cluster.decide(PickRequest(model="base"), 0.0)
    assert not isinstance(decision, Refusal)
    assert decision.request.adapter_s is None


@pytest.mark.parametrize("streams", [True, False])
def test_a_first_token_that_is_late_teaches(streams: bool) -> None:
    """Only where it can be seen. The adapter is in use until the end, once."""
    world = World()
    world.list(A, "x")
    picked = pick_endpoint(
        world.cluster, PickRequest(model="x", streams=streams, facts=OverlapFacts(100)), world.clock()
    )
    assert picked is not None
    assert world.engine(A).state("x") is AdapterState.RUNNING
    world.clock.advance(5.0)
    picked.first_token(world.clock())
    picked.first_token(world.clock())
    samples = world.cluster.adapters.times.samples
    assert samples == ({AdapterState.ROOM: 1} if streams else {})
    picked.settle(AttemptOutcome.SUCCESS, now=world.clock())
    assert not world.engine(A)._requests
    if streams:
        assert world.cluster.adapters.times.expected_s(AdapterState.ROOM) > 1.0
    learned = world.cluster.adapters.estimates()["room"]
    assert learned == {"seconds": pytest.approx(world.cluster.adapters.times.expected_s(AdapterState.ROOM), abs=1e-4),
                       "samples": int(streams)}  # fmt: skip


def test_status_names_what_is_served_and_loaded() -> None:
    world = World()
    assert world.cluster.endpoints[0].status(0.0)["adapters"] is None
    world.list(A, "x", "y")
    world.engine(A).use = use(2, "y")
    assert world.cluster.endpoints[0].status(0.0)["adapters"] == {"served": ["x", "y"], "loaded": ["y"], "slots": 2}


def test_a_new_process_has_nothing_loaded() -> None:
    world = World()
    world.list(A, "x")
    world.engine(A).use = use(2, "x")
    world.cluster.forget_process(world.cluster.engines[0])
    assert world.engine(A).state("x") is AdapterState.ROOM
