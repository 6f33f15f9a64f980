"""KV events of simulated engines into the precise index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, LowerTokens, Tier
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.indexes.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvproxy.cache.overlap.facts import Result
from kvproxy.cache.overlap.gauges import TierCounts
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.store import TierMemory
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routing.policy import PRECISE
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings
from kvproxy.features.kv_events.status import StreamReason, StreamState, StreamStatus
from kvproxy.features.kv_events.streams import ASK_AGAIN_S, EventStreams, _Consumer
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.retention import TierSettings
from kvproxy.operate.admin.cache_status import troubles
from kvproxy.proxy.listener.server import serve
from tests.cache.fleet import Place, simulated
from tests.cache.support import (
    NOWHERE,
    A,
    B,
    Fake,
    Service,
    chat,
    cluster_of,
    engine,
    long_text,
    running,
    settings,
    tokens,
    world,
)
from tests.lab.simulator.support import TINY
from tests.support.clock import FakeClock
from tests.support.until import until

TURN = long_text("w", 200)
EVENTS = {"kv_events": PublisherSettings()}


async def generate(place: Place, name: str, content: str) -> dict[str, Any]:
    """Send a chat straight to the engine, past the proxy; returns its usage."""
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = await http.post(f"{place.engines[name]}/v1/chat/completions", json=body)
        usage: dict[str, Any] = answer.json()["usage"]
        return usage


@contextlib.asynccontextmanager
async def followed() -> AsyncIterator[tuple[Place, Service]]:
    """Two engines that publish, and a service that follows both."""
    async with contextlib.AsyncExitStack() as stack:
        place = await stack.enter_async_context(simulated(engine=EVENTS))
        cluster = cluster_of(place.engines)
        service = await stack.enter_async_context(running(settings(kv_events=True), cluster))
        await until(lambda: exact(service) == {A, B})
        yield place, service


def streams_of(service: Service) -> EventStreams:
    reports = service.kv.overlap.reports
    assert isinstance(reports, EventStreams)
    return reports


def exact(service: Service) -> set[EndpointId]:
    return set(service.kv.overlap.indexes["default"].exact)


async def knows_tokens(service: Service, content: str) -> None:
    """Store the prompt's tokens (as after an earlier turn)."""
    request = chat(content, model="tiny")
    facts = service.kv.gather(*request, cluster=service.cluster)
    task = service.kv.overlap.tokens.start_tokenizing(facts)
    assert task is not None
    assert await task is not None


async def test_events_count_whoever_sent_the_request() -> None:
    """A prompt that came another way is found by its tokens, with the engine's own blocks."""
    async with followed() as (place, service):
        usage = await generate(place, "b", TURN)
        await until(lambda: service.kv.overlap.indexes["default"].precise.count_rows(B) > 0)
        await knows_tokens(service, TURN)
        facts = await service.ask(chat(TURN, model="tiny"))
        assert facts.preferred == B
        overlap = facts.overlaps.by_endpoint[B]
        assert overlap.source is PRECISE
        assert overlap.device_tokens == usage["prompt_tokens"] // 32 * 32
        assert service.metric("kvproxy_kvcache_index_blocks", index="precise") > 0


async def test_an_exact_stream_is_believed_over_what_was_routed() -> None:
    """The engine dropped everything: what we sent there does not count any more."""
    async with followed() as (_place, service):
        await knows_tokens(service, TURN)
        request = chat(TURN, model="tiny")
        assert (await service.serve(request, A)).preferred is None
        assert (await service.ask(request)).preferred is None  # routed, answered, and never announced
        under_way = await service.ask(request)
        service.kv.placed(under_way, A)
        assert (await service.ask(request)).preferred == A  # promised: it is being computed


async def test_only_blocks_that_an_engine_computed_prove_its_silence(clock: FakeClock) -> None:
    """A hit publishes nothing, and vLLM counts it for clients only with `--enable-prompt-tokens-details`; nor does what
    fills no block."""
    async with simulated(engine=EVENTS) as place:
        config = settings(kv_events=True)
        async with running(config, cluster_of(place.engines, clock=clock), clock=clock) as service:
            await until(lambda: exact(service) == {A, B})
            usage = await generate(place, "a", TURN)
            await until(lambda: service.kv.overlap.indexes["default"].precise.count_rows(A) > 0)
            await knows_tokens(service, TURN)

            async def serve_twice(content: str) -> None:
                for _ in range(2):
                    facts = await service.ask(chat(content, model="tiny"))
                    service.kv.placed(facts, A)
                    service.kv.finished(facts, Result(A, True, prompt_tokens=usage["prompt_tokens"]))
                    clock.advance(31.0)

            await serve_twice(TURN)
            assert exact(service) == {A, B}
            service.kv.overlap.indexes["default"].steps.tell_block_size(A, 1056)
            await serve_twice(TURN.upper())  # shorter than a block of this hybrid model
            assert exact(service) == {A, B}
            service.kv.overlap.indexes["default"].steps.tell_block_size(A, 32)
            await serve_twice(TURN[::-1])
            assert exact(service) == {B}


async def test_streams_that_are_not_complete_are_troubles() -> None:
    """With the endpoint, what happened, and what it means; gone when the stream is exact again."""
    async with followed() as (_place, service):
        streams = streams_of(service)
        assert troubles(service.kv) == []
        (subscriber, *_) = streams._streams[service.cluster.endpoints[0]][2]
        subscriber._health.mark_disconnected()
        (trouble,) = troubles(service.kv)
        assert (trouble["kind"], trouble["cluster"], trouble["endpoint"]) == ("event_stream", "default", "a")
        assert (trouble["what"], trouble["last_error"]) == ("a/0", "disconnected")
        subscriber._health.mark_connected()
        subscriber._health.mark_synchronised(None)
        assert troubles(service.kv) == []


async def test_an_engine_without_events_is_left_alone_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """A warning: every engine was expected to publish."""
    plain = Fake({})
    async with world({"a": plain}, kv_events=True) as service:
        await until(lambda: "no address of KV events" in caplog.text)  # it was asked, and the answer was looked at
        assert plain.calls["/kv_event_sources"] == 1
        streams = streams_of(service)
        await streams.follow_endpoints()
        assert plain.calls["/kv_event_sources"] == 1
    (line,) = [one for one in caplog.records if "KV events" in one.getMessage()]
    assert (line.levelname, line.getMessage()) == (
        "WARNING",
        "[kvcache] a: no address of KV events is known (`kv_event_sources` can name one); "
        "their indexes follow routed requests",
    )


class Starting:
    """An engine before a restart (`as_before` answers for it), and as it is after one."""

    def __init__(self, engine: ASGIApp, as_before: Fake) -> None:
        self._engine, self._before = engine, as_before
        self.restarted = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._engine if self.restarted else self._before)(scope, receive, send)


@contextlib.asynccontextmanager
async def looking(cluster: Cluster, clock: FakeClock, *, required: bool = False) -> AsyncIterator[EventStreams]:
    """Streams that look at their endpoints once, and then when a test says so."""
    looked = asyncio.Event()

    async def sleep(_: float) -> None:
        looked.set()
        await asyncio.Event().wait()

    streams = EventStreams(
        clusters={"default": cluster}, timeout_s=20, metrics=Metrics(), clock=clock, sleep=sleep, required=required
    )
    async with streams:
        await looked.wait()
        yield streams


async def test_by_default_streams_follow_the_policies_that_weigh_what_they_bring(clock: FakeClock) -> None:
    """A reload from round_robin to kv_aware begins them, and one back ends them."""
    async with simulated(engine=EVENTS, names=("a",)) as place:
        cluster = cluster_of(place.engines, policy="round_robin")
        (endpoint,) = cluster.endpoints
        async with looking(cluster, clock) as streams:
            assert streams.publishes(endpoint) is None
            for policy, follows in (("kv_aware", True), ("round_robin", None)):
                settings_after = cluster_of(place.engines, policy=policy).settings
                cluster.reconfigure(settings_after, probe=None)
                await streams.follow_endpoints()
                assert streams.publishes(endpoint) is follows
        async with looking(cluster, clock, required=True) as streams:
            assert streams.publishes(endpoint)


async def test_engines_without_events_are_one_line_and_no_warning(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """By default events are followed where there are any; nothing is kept for them before one engine publishes."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    nothing = Fake({"/kv_event_sources": lambda _: {}})
    async with serve(nothing) as a, serve(nothing) as b:
        cluster = cluster_of({"a": a, "b": b})
        async with looking(cluster, clock) as streams:
            await streams.follow_endpoints()
            assert [streams.publishes(one) for one in cluster.endpoints] == [False, False]
            local = LocalIndexes(IndexState(), streams.followed["default"])
            assert not local.followed.any
    (line,) = [one for one in caplog.records if "KV events" in one.getMessage()]
    assert (line.levelname, line.getMessage()) == (
        "INFO",
        "[kvcache] a, b: no KV events are published; their indexes follow routed requests",
    )


@pytest.mark.parametrize("before", [(404, {"detail": "Not Found"}), (200, {}), (503, {"detail": "starting"})])
async def test_an_engine_that_publishes_after_a_restart_is_followed(clock: FakeClock, before: Any) -> None:
    """It is asked again after a while, whatever it had answered."""
    async with simulated(engine=EVENTS, names=("a",)) as place:
        engine_at = Starting(place.fleet.engines["a"], Fake({"/kv_event_sources": lambda _: before}))
        async with serve(engine_at) as url:
            cluster = cluster_of({"a": url})
            async with looking(cluster, clock) as streams:
                (endpoint,) = cluster.endpoints
                assert not streams.publishes(endpoint)
                engine_at.restarted = True
                clock.advance(ASK_AGAIN_S + 1.0)
                await streams.follow_endpoints()
                assert streams.publishes(endpoint)
                assert LocalIndexes(IndexState(), streams.followed["default"]).followed.any


async def test_an_engine_that_publishes_nothing_after_a_restart_is_let_go(clock: FakeClock) -> None:
    """Once its streams have been broken for a while it is asked, and its index is routed requests again."""
    async with simulated(engine=EVENTS, names=("a",)) as place:
        engine_at = Starting(place.fleet.engines["a"], Fake({"/kv_event_sources": lambda _: {}}))
        engine_at.restarted = True
        async with serve(engine_at) as url:
            cluster = cluster_of({"a": url})
            async with looking(cluster, clock) as streams:
                (endpoint,) = cluster.endpoints
                (subscriber,) = streams._streams[endpoint][2]
                await until(lambda: subscriber.status.state is StreamState.EXACT)
                subscriber._health.mark_disconnected()
                engine_at.restarted = False
                await streams.follow_endpoints()
                assert streams.publishes(endpoint)  # it may be back any moment
                clock.advance(ASK_AGAIN_S + 1.0)
                subscriber._health.mark_disconnected()
                await streams.follow_endpoints()
                await streams.follow_endpoints()
                assert streams.publishes(endpoint) is False
                assert not streams.followed["default"].any


async def test_an_engine_that_could_not_be_reached_is_asked_again(clock: FakeClock) -> None:
    """After a restart it publishes at another port, whereas there never was a connection to the first one."""
    async with simulated(engine=EVENTS, names=("a",)) as place:
        elsewhere = {"0": {"endpoint": "tcp://*:1"}}
        engine_at = Starting(place.fleet.engines["a"], Fake({"/kv_event_sources": lambda _: elsewhere}))
        async with serve(engine_at) as url:
            cluster = cluster_of({"a": url})
            async with looking(cluster, clock) as streams:
                (endpoint,) = cluster.endpoints
                await streams.follow_endpoints()
                engine_at.restarted = True
                clock.advance(ASK_AGAIN_S + 1.0)
                assert [one.for_s for one in streams.find_troubles()] == [ASK_AGAIN_S + 1.0]
                await streams.follow_endpoints()
                await streams.follow_endpoints()
                await until(lambda: streams.streams(endpoint)[0].state is StreamState.EXACT)
                assert not list(streams.find_troubles())


async def test_an_endpoint_that_discovery_adds_is_followed(clock: FakeClock) -> None:
    """With the ones there are."""
    async with simulated(engine=EVENTS) as place:
        cluster = cluster_of({"a": place.engines["a"]})
        async with looking(cluster, clock) as streams:
            cluster.apply_endpoints([EndpointSettings(id=name, url=url) for name, url in place.engines.items()])
            await streams.follow_endpoints()
            assert [streams.publishes(one) for one in cluster.endpoints] == [True, True]


class Older:
    """An engine as it was before `/kv_event_sources`."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hidden = {**scope, "path": "/nowhere"} if scope.get("path") == "/kv_event_sources" else scope
        await self._engine(hidden, receive, send)


async def test_an_endpoints_own_settings_come_first() -> None:
    """Older engines on one host have ports of their own, which one setting for all cannot tell."""
    async with simulated(engine=EVENTS, names=("a",)) as place, httpx.AsyncClient(trust_env=False) as http:
        said = (await http.get(f"{place.engines['a']}/kv_event_sources")).json()["0"]
        stated = {name: f"tcp://*:{said[name].rpartition(':')[2]}" for name in ("endpoint", "replay_endpoint")}
        async with serve(Older(place.fleet.engines["a"])) as url:
            endpoint = EndpointSettings.model_validate({"id": "a", "url": url, "kv_event_sources": stated})
            settings_of_all = settings(kv_events=True, kv_event_sources={"endpoint": "tcp://*:1"})
            config = ClusterSettings(endpoints=(endpoint,))
            cluster = Cluster("default", config, metrics=Metrics(), clock=time.monotonic, rng=Random(1))
            async with running(settings_of_all, cluster) as service:
                await until(lambda: exact(service) == {A})


async def test_an_older_engine_is_followed_where_the_configuration_says() -> None:
    """It cannot say where it publishes; its operator can."""
    async with simulated(engine=EVENTS, names=("a",)) as place, httpx.AsyncClient(trust_env=False) as http:
        said = (await http.get(f"{place.engines['a']}/kv_event_sources")).json()["0"]
        stated = {name: f"tcp://*:{said[name].rpartition(':')[2]}" for name in ("endpoint", "replay_endpoint")}
        async with serve(Older(place.fleet.engines["a"])) as url:
            configured = settings(kv_events=True, kv_event_sources=stated)
            async with running(configured, cluster_of({"a": url})) as service:
                await until(lambda: exact(service) == {A})
                await generate(place, "a", TURN)
                await until(lambda: service.kv.overlap.indexes["default"].precise.count_rows(A) > 0)


async def test_an_engine_that_is_down_is_asked_again() -> None:
    down = Fake({"/kv_event_sources": lambda _: (503, {"detail": "starting"})})
    async with world({"a": down}, kv_events=True) as service:
        streams = streams_of(service)
        await until(lambda: down.calls["/kv_event_sources"])
        for _ in range(2):
            await streams.follow_endpoints()  # what the first answer meant is known by now
            before = down.calls["/kv_event_sources"]
            await streams.follow_endpoints()
            assert down.calls["/kv_event_sources"] > before


async def test_an_engine_that_does_not_answer_delays_no_other() -> None:
    """One host that is gone costs each query its whole time-out."""
    answers = asyncio.Event()

    async def hang(_: dict[str, Any]) -> dict[str, Any]:
        await answers.wait()
        return {}

    async with simulated(engine=EVENTS, names=("b",)) as place, serve(Fake({"/kv_event_sources": hang})) as url:
        cluster = cluster_of({"a": url, **place.engines})
        streams = EventStreams(clusters={"default": cluster}, timeout_s=3600, metrics=Metrics(), clock=time.monotonic)
        async with streams:
            await until(lambda: [streams.publishes(one) for one in cluster.endpoints] == [None, True])
            answers.set()
            await until(lambda: [streams.publishes(one) for one in cluster.endpoints] == [False, True])


async def test_streams_end_with_their_endpoint() -> None:
    """And what they told is forgotten."""
    async with followed() as (place, service):
        await generate(place, "b", TURN)
        await until(lambda: service.kv.overlap.indexes["default"].precise.count_rows(B) > 0)
        service.cluster.apply_endpoints([EndpointSettings(id="a", url=place.engines["a"])])
        streams = streams_of(service)
        await streams.follow_endpoints()
        assert exact(service) == {A}
        assert service.kv.overlap.indexes["default"].precise.count_rows(B) == 0


async def test_the_same_tokens_under_a_lora_are_other_blocks() -> None:
    """An adapter's KV is of no use to the base model, and the other way round."""
    followed = FollowedEvents()
    local = LocalIndexes(IndexState(), followed)
    consumer = _Consumer(followed)
    ids = tokens(64)

    def stored(lora: str | None, first: int) -> BlockStored:
        return BlockStored((first, first + 1), None, ids, 32, lora_name=lora)

    def held(model: str) -> int:
        nothing = local.approximate.locate(array("Q"))
        found = local.find_overlaps(nothing, bytes_per_token=4, tokens=ids, model=model, cache_salt=None)
        return found[A].device_tokens if A in found else 0

    consumer.apply(A, 0, [stored("adapter", 1)])
    assert (held("adapter"), held("base")) == (64, 0)
    consumer.apply(A, 0, [stored(None, 11)])
    assert (held("adapter"), held("base")) == (64, 64)


async def test_entries_of_a_shared_store_count_for_all_its_readers() -> None:
    """As far as its beginning lies there, whatever the engine has nearer; gone from there, it counts for its own
    endpoint alone."""
    cluster = cluster_of({"a": NOWHERE, "b": NOWHERE, "c": NOWHERE})
    next(one for one in cluster.endpoints if one.id == "c").reads_shared_kv = False
    async with running(settings(kv_events=True), cluster) as service:
        local = service.kv.overlap.indexes["default"]
        consumer = _Consumer(local.followed)
        ids = tokens(128)

        def held(*, known: int = 128) -> dict[str, tuple[int, LowerTokens]]:
            nothing = local.approximate.locate(array("Q"))
            found = local.find_overlaps(
                nothing, bytes_per_token=4, tokens=ids[:known], cache_salt=None, prompt_tokens=known
            )
            return {name: (one.device_tokens, one.lower) for name, one in found.items()}

        consumer.apply(A, 0, [BlockStored((1, 2, 3, 4), None, ids, 32)])
        assert held() == {"a": (128, ())}
        consumer.apply(A, 0, [BlockStored((1, 2, 3), None, ids[:96], 32, medium="EXTERNAL")])
        consumer.apply(B, 0, [BlockStored((11,), None, ids[:32], 32)])
        stored = ((Tier.SHARED, 64),)
        assert held() == {"a": (128, ()), "b": (32, stored)}
        assert held(known=64) == {"a": (64, ()), "b": (32, ((Tier.SHARED, 32),))}
        consumer.apply(A, 0, [BlockRemoved((1,), medium="EXTERNAL")])
        assert held() == {"a": (128, ()), "b": (32, ())}


async def test_shared_entries_denied_by_cached_tokens_are_dropped_for_a_while(clock: FakeClock) -> None:
    """For every engine that reads the store, the one that had reported it as well; what is nearer, and what the engine
    found, stay."""
    async with world({"a": engine(), "b": engine()}, clock=clock, kv_events=True) as service:
        consumer, request = _Consumer(service.kv.overlap.indexes["default"].followed), chat(TURN, model="tiny")
        await knows_tokens(service, TURN)
        known = (await service.ask(request)).tokens
        assert known is not None
        blocks = tuple(range(1, len(known) // 32 + 1))
        ids, held = array("I", known[: 32 * len(blocks)]), 32 * len(blocks)
        consumer.apply(A, 0, [BlockStored(blocks, None, ids, 32, medium="EXTERNAL")])
        consumer.apply(B, 0, [BlockStored(blocks[:3], None, ids[:96], 32)])

        async def lower() -> dict[str, int]:
            found = (await service.ask(request)).overlaps.by_endpoint
            return {name: sum(tokens for _, tokens in one.lower) for name, one in found.items()}

        assert await lower() == {"a": held, "b": held - 96}
        facts = await service.ask(request)
        service.kv.placed(facts, B)
        service.kv.finished(facts, Result(B, True, prompt_tokens=len(known), cached_tokens=96))
        assert (await lower()).get("b", 0) == 0
        assert (await lower()).get("a", 0) <= 96
        clock.advance(61.0)
        assert (await lower())["a"] > 96


class Broken(dict[str, Cluster]):
    """Clusters that cannot be looked at."""

    def items(self) -> Any:
        raise RuntimeError("a mistake")


async def test_a_mistake_while_following_is_logged_and_tried_again(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    naps = asyncio.Semaphore(0)

    async def sleep(_: float) -> None:
        naps.release()
        await asyncio.sleep(0)

    streams = EventStreams(clusters=Broken(), timeout_s=1, metrics=Metrics(), clock=clock, sleep=sleep)
    with caplog.at_level(logging.ERROR):
        async with streams:
            await naps.acquire()
            await naps.acquire()
    assert caplog.text.count("cannot be followed") >= 2


def test_an_endpoint_is_exact_only_while_every_rank_is() -> None:
    """A prompt may be on any of its ranks, so one that misses events makes the whole endpoint a guess."""
    followed = FollowedEvents()
    local = LocalIndexes(IndexState(), followed)
    consumer = _Consumer(followed)
    following = StreamStatus(StreamState.EXACT, StreamReason.FOLLOWING)
    consumer.state_changed(A, 0, following)
    assert set(local.exact) == {A}
    consumer.state_changed(A, 1, StreamStatus(StreamState.DEGRADED, StreamReason.LOST_EVENTS))
    assert set(local.exact) == set()
    consumer.state_changed(A, 1, following)
    assert set(local.exact) == {A}


def test_a_stream_that_tells_of_no_prefixes_is_not_exact() -> None:
    """Whatever comes complete from a rank that announces only blocks that make none, it may hold any prompt."""
    followed = FollowedEvents()
    local = LocalIndexes(IndexState(), followed)
    consumer = _Consumer(followed)
    consumer.state_changed(A, 0, StreamStatus(StreamState.EXACT, StreamReason.FOLLOWING))
    window = BlockStored((1,), None, tokens(16), 16, group=0, spec_kind="sliding_window", window=32)
    consumer.apply(A, 0, [window])
    assert followed.precise.lacks_prefixes(A, 0)
    assert set(local.exact) == set()
    consumer.apply(A, 0, [BlockStored((2,), None, tokens(16), 16)])
    assert set(local.exact) == {A}


async def test_an_index_of_streams_that_ended_is_given_back_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than at once, when the last holder lets go: a million runs take a tenth of a second."""
    steps: list[int] = []
    local = FollowedEvents()
    sweep = local.precise.sweep_rows

    def counted() -> bool:
        steps.append(len(table))
        return sweep()

    for number in range(5000):
        local.precise.apply_events(A, 0, [BlockStored((number,), None, array("I", [number] * 16), 16)])
    (table,) = local.precise.tables.by_source.values()
    monkeypatch.setattr(local.precise, "sweep_rows", counted)
    consumer = _Consumer(local)
    consumer.forget(A)
    assert len(table) > 0
    await consumer.sweep()
    assert len(table) == 0
    assert len(steps) >= 4


async def test_blocks_evicted_from_engine_memory_are_found_on_the_host_tier() -> None:
    """By the engine's own events, each with its medium: the prompt is worth a visit there all the same."""
    small = replace(TINY.engine, capacity_blocks=40, tiers=(TierSettings("CPU", 4000, 0.0),))
    async with contextlib.AsyncExitStack() as stack:
        place = await stack.enter_async_context(simulated(engine={**EVENTS, "engine": small}))
        service = await stack.enter_async_context(running(settings(kv_events=True), cluster_of(place.engines)))
        await until(lambda: exact(service) == {A, B})
        held = (await generate(place, "b", TURN))["prompt_tokens"] // 32 * 32
        await knows_tokens(service, TURN)
        for other in range(40):
            await generate(place, "b", long_text(f"other{other}", 200))

        await until(lambda: service.kv.overlap.indexes["default"].precise.counts.removed > 0)
        found = (await service.ask(chat(TURN, model="tiny"))).overlaps.by_endpoint[B]
        assert (found.device_tokens + found.lower_tokens, found.lower[0][0]) == (held, Tier.HOST)
        usage = await generate(place, "b", TURN)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= held - 32

        indexes = service.kv.overlap.indexes
        counts = TierCounts(indexes, service.kv.clusters, clock=lambda: 0.0)
        await counts.refresh()
        counted = counts.holdings("default", B)
        assert counted[Tier.DEVICE][0] <= 40 < counted[Tier.HOST][0]
        assert all(tokens == 32 * blocks for blocks, tokens in counted.values())
        assert counted[Tier.HOST][0] == indexes["default"].precise.count_rows(B)  # all is written through
        memory = [TierMemory("b", Tier.HOST, 7, 9, 0.8), TierMemory("a", Tier.DISK, 7, 9, 0.8)]
        shown = counts.describe("default", service.cluster.endpoints[1], memory)
        assert [(one["tier"], one["tokens"], one["used_bytes"]) for one in shown] == [
            ("device", counted[Tier.DEVICE][1], None),
            ("host", counted[Tier.HOST][1], 7),
        ]
        await generate(place, "b", TURN)
        await counts.refresh()
        assert counts.holdings("default", B) == counted  # a count stands for a while: it takes time


@pytest.mark.parametrize(
    ("state", "noticed"), [(None, False), ("CONNECTING", False), ("EXACT", True), ("DEGRADED", True)]
)
async def test_a_cache_that_is_dropped_now_is_told_from_history(state: str | None, noticed: bool) -> None:
    """Every stream of SGLang begins with such an event; what a replay brings is over."""
    async with world({"a": engine()}, kv_events=False) as service:
        followed: FollowedEvents = service.kv.overlap.indexes["default"].followed
        consumer = _Consumer(followed)
        await service.serve(chat(TURN), A)
        if state is not None:
            consumer.state_changed(A, 0, StreamStatus(StreamState[state], StreamReason.FOLLOWING))
        consumer.apply(A, 0, [BlockStored((1,), None, tokens(16), 16), AllBlocksCleared()])
        assert followed.precise.count_rows(A) == 0
        loss = service.kv.state.losses.latest_loss("default", A)
        assert (loss is not None and loss.reason is LossReason.CLEARED) is noticed
        assert ((await service.ask(chat(TURN))).preferred is None) is noticed
