"""Features that observe the cache service: when each hook is called, and that those not overridden cost nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.feature import CacheFeature, CacheNeeds, CacheObserver, CacheParts, View, find_needs
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.proxy.filters.kvcache import use_facts
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from tests.cache.support import A, chat, engine, long_text, settings, world

PROMPT = chat(long_text("a"))


class Watch(RequestObserver):
    """Notes the end of its request."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def finished(self, exchange: Exchange, now: float) -> None:
        self._noted.append("finished")


class Notes(CacheObserver):
    """Notes every hook."""

    def __init__(self, parts: CacheParts) -> None:
        self.parts = parts
        self.noted: list[str] = []

    def watch(self, facts: RequestFacts) -> Watch | None:
        return Watch(self.noted) if facts.model == "m" else None

    def tokens_known(
        self, facts: RequestFacts, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint
    ) -> None:
        self.noted.append(f"{len(tokens)} tokens at {endpoint.id}, {len(used[-1].tokens)} of its prefix")

    def tick(self) -> None:
        self.noted.append("tick")

    def bind_gauges(self, metrics: Metrics) -> None:
        self.noted.append("gauges")

    def close(self) -> None:
        self.noted.append("close")


class Noting(CacheFeature):
    """On wherever it is installed."""

    name = "noting"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        return CacheNeeds(facts=True, uses=True)

    def observe_cache(self, parts: CacheParts) -> Notes:
        return Notes(parts)

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        return {"noted": len(observer.noted) if isinstance(observer, Notes) else None, "view": view}


class Idle(CacheFeature):
    """Observes without a hook of its own."""

    name = "idle"

    def observe_cache(self, parts: CacheParts) -> CacheObserver:
        return CacheObserver()


class Off(Noting):
    """Switched off."""

    name = "off"

    def observe_cache(self, parts: CacheParts) -> None:  # type: ignore[override]
        return None


async def test_each_hook_in_its_turn() -> None:
    """A request's own observer hears of its end before what is done about its prompt, whose tokens are asked for."""
    async with world({"a": engine()}, features=[Noting()]) as service:
        notes = service.kv.observers.by_feature["noting"]
        assert isinstance(notes, Notes)
        assert notes.parts.state is service.kv.state
        facts = await service.ask(PROMPT)
        exchange = Exchange(received_at=0.0)
        exchange.outcome.endpoint = A
        exchange.outcome.ttft_s = 0.1
        exchange.outcome.status = 200
        use_facts(service.kv, facts, exchange, prefers=False)
        service.kv.placed(facts, A)
        notify(RequestObserver.finished, exchange, 1.0)
        await service.settled()
        await service.kv._tick()
        tokens = "601 tokens at a, 601 of its prefix"
        assert notes.noted == ["gauges", "finished", tokens, "tick"]
        assert service.kv.observers.describe("live", 0.0) == {"noted": 4, "view": "live"}
    assert notes.noted[-1] == "close"


async def test_a_request_may_go_unobserved() -> None:
    """`watch` decides by its facts."""
    async with world({"a": engine()}, features=[Noting()]) as service:
        facts = await service.ask(PROMPT)
        facts.model = "another"
        exchange = Exchange(received_at=0.0)
        use_facts(service.kv, facts, exchange, prefers=False)
        assert [type(one).__name__ for one in exchange.observers] == ["KvCacheLearning"]


async def test_hooks_that_no_feature_has_are_not_called() -> None:
    """And a feature that is switched off still adds its keys to answers."""
    async with world({"a": engine()}, features=[Idle(), Off()]) as service:
        observers = service.kv.observers
        assert list(observers.by_feature) == ["idle"]
        assert (observers.watches, observers.ticks, observers.on_tokens) == ([], [], [])
        assert observers.describe("leases", 0.0) == {"noted": None, "view": "leases"}


async def test_uses_are_counted_only_where_a_feature_needs_them() -> None:
    """Without one, and without LMCache, no prefix is remembered."""
    for features, known in (([Noting()], 1), ([Idle()], 0)):
        async with world({"a": engine()}, features=features) as service:
            await service.serve(PROMPT, A)
            await service.settled()
            assert len(list(service.kv.actions.hotness.walk_latest(10))) == known


def test_needs_of_several_features_are_united() -> None:
    assert find_needs([Idle(), Noting()], settings()) == CacheNeeds(facts=True, uses=True)
    assert find_needs([], settings()) == CacheNeeds()
