"""The two LMCache services behind one interface, against simulated ones."""

from __future__ import annotations

import logging
from array import array
from typing import Any

import httpx
import pytest

from kvproxy.base.errors import ClientError, NotSupported, UnknownInstance
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Tier
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.feedback.prediction_stats import PredictionAlarm
from kvproxy.cache.store import ActionKind, Holder, Prefix, TierMemory
from kvproxy.cluster.routing.policy import FactSource
from kvproxy.features.lmcache.connection import Connection
from kvproxy.features.lmcache.controller import LMCacheController
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.provider import CONTROLLER, COORDINATOR, Effect
from kvproxy.lab.simulator.lmcache_chunks import WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from tests.cache.fleet import Place, simulated
from tests.cache.support import A, Fake, settings, tokens
from tests.support.clock import FakeClock
from tests.support.loopback import serve

PROMPT = Prefix(tokens(1024), "models/tiny-qwen")


def controller(http: httpx.AsyncClient, place: Place) -> LMCacheController:
    return LMCacheController(http, place.lmcache)


def coordinator(http: httpx.AsyncClient, place: Place, model: str = "") -> LMCacheCoordinator:
    return LMCacheCoordinator(http, place.lmcache, model=model)


def hold(place: Place, name: str, held: array[int] = PROMPT.tokens) -> None:
    """Store these tokens at the instance."""
    if place.fleet.controller is not None:
        place.fleet.controller.workers[name].admit(held)
    if place.fleet.coordinator is not None:
        place.fleet.coordinator.admit(name, held, model_name=PROMPT.model)


async def test_a_sole_holder_has_a_contiguous_prefix() -> None:
    async with simulated() as place, httpx.AsyncClient() as http:
        hold(place, "b")
        provider = controller(http, place)
        assert provider.source is CONTROLLER
        assert await provider.lookup(PROMPT) == [Holder("b", 1024, True)]
        assert await provider.lookup(Prefix(tokens(100), "m")) == []


async def test_several_holders_are_hints() -> None:
    """b has the first chunk, a the rest: a is named with 1024 and can serve none of it."""
    async with simulated() as place, httpx.AsyncClient() as http:
        assert place.fleet.controller is not None
        hold(place, "b", PROMPT.tokens[:256])
        a = place.fleet.controller.workers["a"]
        a.admit(PROMPT.tokens)
        cpu = a.stores["LocalCPUBackend"]
        cpu.remove([next(iter(cpu._chunks))])
        found = await controller(http, place).lookup(PROMPT)
        assert sorted(found, key=lambda one: one.tokens) == [Holder("b", 256, False), Holder("a", 1024, False)]


async def test_abilities_of_a_controller() -> None:
    async with simulated() as place, httpx.AsyncClient() as http:
        hold(place, "a")
        provider = controller(http, place)
        for kind in (ActionKind.PIN, ActionKind.COMPRESS, ActionKind.DECOMPRESS):
            effect = await provider.act(kind, "a", PROMPT)
            assert effect.amount is not None
            assert effect.amount > 0, kind
        assert (await provider.act(ActionKind.CLEAR, "a", PROMPT)).amount == 0  # all of it is pinned
        assert await provider.instances() == {"a", "b"}
        assert await provider.indexed_chunks() == 4
        assert not await provider.memory()
        with pytest.raises(NotSupported):
            await provider.act(ActionKind.UNPIN, "a", PROMPT)


async def test_evict_is_supported_until_the_controller_says_otherwise() -> None:
    """`POST /evict` is 404 in every version; Pixiu's stand-in has it."""
    async with simulated() as place, httpx.AsyncClient() as http:
        provider = controller(http, place)
        assert ActionKind.EVICT in provider.supports
        with pytest.raises(NotSupported):
            await provider.act(ActionKind.EVICT, "a", PROMPT)
        assert ActionKind.EVICT not in provider.supports
    async with simulated(controller=ControllerSettings(pixiu_shape=True)) as place, httpx.AsyncClient() as http:
        hold(place, "a")
        provider = controller(http, place)
        effect = await provider.act(ActionKind.EVICT, "a", PROMPT)
        assert effect.amount
        assert ActionKind.EVICT in provider.supports


async def test_a_coordinator_names_every_holder() -> None:
    async with simulated(controller=None, coordinator=CoordinatorSettings()) as place, httpx.AsyncClient() as http:
        hold(place, "a")
        hold(place, "b", PROMPT.tokens[:512])
        provider = coordinator(http, place)
        found = await provider.lookup(PROMPT)
        assert {one.instance_id: (one.tokens, one.contiguous) for one in found} == {"a": (1024, True), "b": (512, True)}
        assert await provider.lookup(Prefix(PROMPT.tokens, "another model")) == []
        named = coordinator(http, place, model=PROMPT.model)
        assert len(await named.lookup(Prefix(PROMPT.tokens, "its served name"))) == 2


async def test_abilities_of_a_coordinator() -> None:
    async with simulated(controller=None, coordinator=CoordinatorSettings()) as place, httpx.AsyncClient() as http:
        hold(place, "a")
        provider = coordinator(http, place)
        assert await provider.instances() == {"a", "b"}
        assert await provider.indexed_chunks() == 4
        memory = {(one.instance_id, one.tier): one for one in await provider.memory()}
        held = memory["a", Tier.HOST]
        assert 0 < held.used_bytes < held.capacity_bytes
        assert held.share == pytest.approx(held.used_bytes / held.capacity_bytes)
        assert isinstance(await provider.act(ActionKind.PIN, "a", PROMPT), Effect)
        assert isinstance(await provider.act(ActionKind.UNPIN, "a", PROMPT), Effect)
        evicted = await provider.act(ActionKind.EVICT, "a", PROMPT)
        assert evicted.amount == 4
        assert await provider.lookup(PROMPT) == []
        for kind in (ActionKind.COMPRESS, ActionKind.CLEAR):
            assert kind not in provider.supports
            with pytest.raises(NotSupported):
                await provider.act(kind, "a", PROMPT)


@pytest.mark.parametrize(
    ("known", "asked", "found"),
    [(1024, 1024, 1024), (0, 1024, 0), (512, 1024, 512), (1024, 200, 0), (1024, 1100, 1024)],
)
async def test_a_prefetch_says_what_it_found(known: int, asked: int, found: int) -> None:
    """All, nothing of what nothing holds, half, nothing of less than a chunk, the whole chunks: the status is always
    good."""
    shared = CoordinatorSettings(shared_chunks=64, capacity_chunks=64)
    async with simulated(controller=None, coordinator=shared) as place, httpx.AsyncClient() as http:
        hold(place, "a", PROMPT.tokens[:known])
        provider = coordinator(http, place)
        prefix = Prefix(tokens(asked), PROMPT.model)
        assert await provider.act(ActionKind.TRANSFER, "b", prefix) == Effect(found)
        held = {one.instance_id: one.tokens for one in await provider.lookup(prefix)}
        assert held.get("b", 0) >= found


async def test_memory_of_one_tier_is_one() -> None:
    """Of several stores, such as two disks: as full as the fuller one."""
    disks = [
        {"tier": "l2", "backend": f"fs{used}", "used_bytes": used, "capacity_bytes": 10, "usage_ratio": used / 10}
        for used in (9, 1)
    ]
    said = {"instances": [{"instance_id": "a", "registered": True, "declared_capacity": True, "modules": disks}]}
    async with serve(Fake({"/instances/usage": lambda _: said})) as url, httpx.AsyncClient() as http:
        provider = LMCacheCoordinator(http, url)
        assert await provider.memory() == (TierMemory("a", Tier.DISK, 10, 20, 0.9),)


@pytest.mark.parametrize(("keys", "found"), [(-4, 0), (10**30, 1024)])
async def test_a_prefetch_finds_no_more_than_there_is(keys: int, found: int) -> None:
    """Whatever the service says."""
    asked = {"instance_id": "b", "status": "accepted", "request_id": "r", "chunks": 4}
    over = {"request_id": "r", "status": "completed", "found_keys": keys}
    app = Fake({"/cache/prefetches": lambda _: asked, "/cache/prefetches/b/r": lambda _: over})
    async with serve(app) as url, httpx.AsyncClient() as http:
        provider = LMCacheCoordinator(http, url)
        assert await provider.act(ActionKind.TRANSFER, "b", PROMPT) == Effect(found)


async def test_a_prefetch_into_what_is_not_there() -> None:
    async with simulated(controller=None, coordinator=CoordinatorSettings()) as place, httpx.AsyncClient() as http:
        with pytest.raises(UnknownInstance):
            await coordinator(http, place).act(ActionKind.TRANSFER, "nobody", PROMPT)


async def test_a_controller_copies_where_engines_have_p2p() -> None:
    """From an instance that is named, which keeps its copy; nothing of what it does not hold."""
    workers = tuple(WorkerSettings(name, p2p=True) for name in "ab")
    async with simulated(controller=ControllerSettings(workers)) as place, httpx.AsyncClient() as http:
        hold(place, "a", PROMPT.tokens[:512])
        provider = controller(http, place)
        assert await provider.act(ActionKind.TRANSFER, "b", PROMPT, source="a") == Effect(512)
        assert place.fleet.controller is not None
        assert [place.fleet.controller.workers[name].keys for name in "ab"] == [2, 2]
        assert await provider.act(ActionKind.TRANSFER, "a", Prefix(tokens(512, start=9), "m"), source="b") == Effect(0)
        with pytest.raises(NotSupported, match="needs the instance"):
            await provider.act(ActionKind.TRANSFER, "b", PROMPT)


async def test_a_controller_without_p2p_copies_nothing() -> None:
    async with simulated() as place, httpx.AsyncClient() as http:
        hold(place, "a")
        with pytest.raises(NotSupported, match="P2P is not enabled"):
            await controller(http, place).act(ActionKind.TRANSFER, "b", PROMPT, source="a")


async def test_controllers_before_0_3_5_say_success_instead_of_a_number() -> None:
    """Their word counts as an effect, or as none."""

    async def answered(body: dict[str, Any]) -> Effect:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
        async with httpx.AsyncClient(transport=transport) as http:
            provider = LMCacheController(http, "http://c")
            return await provider.act(ActionKind.PIN, "a", PROMPT)

    assert await answered({"success": True}) == Effect(1)
    assert await answered({"success": False}) == Effect(0)
    assert await answered({"event_id": "x"}) == Effect(None)


def connection(
    http: httpx.AsyncClient, url: str, clock: FakeClock, sleep: Any = None, **changes: Any
) -> tuple[Connection, LookupClient]:
    metrics = Metrics()
    config = settings(lmcache_endpoint=url, **changes)
    lookups = LookupClient(
        breakers=OperationBreakers(config.circuit_breaker, clock=clock, metrics=metrics),
        metrics=metrics,
        clock=clock,
    )
    known: dict[str, Any] = {} if sleep is None else {"sleep": sleep}
    return Connection(config, http, lookups=lookups, known_instances=lambda: {"a", "b"}, **known), lookups


@pytest.mark.parametrize(
    ("fleet", "source"),
    [
        ({}, CONTROLLER),
        ({"controller": None, "coordinator": CoordinatorSettings()}, COORDINATOR),
    ],
)
async def test_the_service_is_found_out_by_asking(
    fleet: dict[str, Any], source: FactSource, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And checked: an index that is still empty is worth a line."""
    async with simulated(**fleet) as place, httpx.AsyncClient() as http:
        under_test, lookups = connection(http, place.lmcache, clock)
        with caplog.at_level(logging.INFO):
            await under_test.run()
    assert lookups.provider is not None
    assert lookups.provider.source is source
    assert f"lookups go to {source}" in caplog.text
    assert "index is empty" in caplog.text


async def test_a_named_service_is_taken_at_once(clock: FakeClock) -> None:
    async with simulated() as place, httpx.AsyncClient() as http:
        for name in ("coordinator", "controller"):
            _, lookups = connection(http, place.lmcache, clock, provider=name)
            assert lookups.provider is not None
            assert lookups.provider.source == f"lmcache_{name}"


async def test_a_named_service_stays_the_one_named(clock: FakeClock) -> None:
    """Whatever answers there."""
    async with simulated() as place, httpx.AsyncClient() as http:
        under_test, lookups = connection(http, place.lmcache, clock, provider="coordinator")
        await under_test.run()
        assert lookups.provider is not None
        assert lookups.provider.source is COORDINATOR


async def test_a_service_that_is_down_is_asked_until_it_answers(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, however long it takes."""
    down = 3

    def answer(request: httpx.Request) -> httpx.Response:
        if down:
            raise httpx.ConnectError("refused")
        return httpx.Response(404, json={"detail": "Not Found"})

    async def sleep(_: float) -> None:
        nonlocal down
        down -= 1

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        under_test, lookups = connection(http, "http://lmcache", clock, sleep)
        await under_test.run()
    assert lookups.provider is not None
    assert caplog.text.count("does not answer") == 1


async def test_a_stand_in_without_listings_is_no_error(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """Pixiu's mock knows lookups and actions only."""
    transport = httpx.ASGITransport(Fake({}))
    async with httpx.AsyncClient(transport=transport) as http:
        with caplog.at_level(logging.INFO):
            await connection(http, "http://lmcache", clock)[0].run()
    assert "does not list its instances" in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)


async def test_lookups_raise_client_errors_only() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"no json"))
    async with httpx.AsyncClient(transport=transport) as http:
        provider = LMCacheController(http, "http://c")
        with pytest.raises(ClientError):
            await provider.lookup(PROMPT)


@pytest.mark.parametrize(("source", "by"), [(CONTROLLER, "LMCache's lookup"), (COORDINATOR, "LMCache's directory")])
def test_an_alarm_about_a_lookup_names_the_service(source: FactSource, by: str) -> None:
    """The core has no words for sources that a feature adds."""
    alarm = PredictionAlarm("default", A, source)
    for _ in range(3):
        alarm.observe_reuse(4096, 0, "r", 0.0)
    raised = alarm.raised(0.0)
    assert raised is not None
    assert f"by {by}, engine reused 0" in raised.what
    assert raised.fix.startswith("likely the engine does not load from LMCache")
