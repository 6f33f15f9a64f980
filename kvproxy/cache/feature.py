"""Features, as far as the cache service meets them: observers of one service, and what the core keeps for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from kvproxy.base.installed import BaseFeature, installed

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock, RequestKind
    from kvproxy.cache.actions.after_response import AfterResponse, OnTokens
    from kvproxy.cache.actions.hotness import KnownPrefix
    from kvproxy.cache.breakers import OperationBreakers
    from kvproxy.cache.clients.tokens import TokenIds
    from kvproxy.cache.clients.vllm import ChatForm
    from kvproxy.cache.engines import Engines
    from kvproxy.cache.metrics_scraper import EngineReadings
    from kvproxy.cache.overlap.facts import RequestFacts, Result
    from kvproxy.cache.overlap.reports import FollowsReports
    from kvproxy.cache.overlap.sources import OverlapSources
    from kvproxy.cache.settings import KvCacheSettings
    from kvproxy.cache.state import CacheState
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.endpoint import Endpoint

#: Answers of the admin listener that get keys of features: `cache` of `/live`, `/cache/status`, the list of pins.
View = Literal["live", "status", "pins"]


class CacheNeeds(NamedTuple):
    """Work that the core does only on demand, since it costs memory or time."""

    facts: bool = False  # match requests against the caches even if no policy wants it
    uses: bool = False  # count uses of prefixes, and keep the tokens of their prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheParts:
    """Parts of one cache service, which is being made: those that observers may use as long as it lives."""

    settings: KvCacheSettings
    clusters: Mapping[str, Cluster]
    state: CacheState
    overlap: OverlapSources
    actions: AfterResponse
    engines: Engines
    breakers: OperationBreakers
    signals: EngineReadings
    metrics: Metrics
    clock: Clock
    wall_clock: Clock
    rng: random.Random


class RequestWatch(Protocol):
    """Observer of one request (`proxy.request.observer.RequestObserver`), as this room uses it."""

    @property
    def hooks(self) -> frozenset[str]: ...


class CacheObserver:
    """Observes one cache service as long as it lives; hooks that a class does not override are not called.

    None of them may wait. A reload makes a new service beside the one that drains: `bind_gauges` marks the one that
    counts.
    """

    #: Entered before the service's own parts start, and left after they ended.
    lifetime: AbstractAsyncContextManager[object] | None = None

    def watch(self, facts: RequestFacts) -> RequestWatch | None:
        """Return the observer of a request whose facts are known; None: none. Its `finished` comes before the service
        learns from the request, and so before `tokens_known`."""

    def tokens_known(
        self, facts: RequestFacts, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint
    ) -> None:
        """Note that this endpoint has computed a prompt with these message prefixes (shortest first) and tokens."""

    def learned(self, facts: RequestFacts, result: Result) -> None:
        """Handle the end of a request, after the service has learned from it; `result.notes` takes a note."""

    def tick(self) -> None:
        """Between requests, after each reading of the engines' metrics."""

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges to this observer."""

    def close(self) -> None:
        """Close the observer with its service; the queue of actions still takes some."""


Observer = TypeVar("Observer", bound=CacheObserver)


class CacheFeature(BaseFeature):
    """Contributions of a feature to the cache service."""

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Return the feature's needs under these settings."""
        return CacheNeeds()

    def follow_reports(self, settings: KvCacheSettings) -> FollowsReports | None:
        """Return how engines' reports of their own caches are followed under these settings; None: they are not."""
        return None

    def observe_cache(self, parts: CacheParts) -> CacheObserver | None:
        """Its observer of this service; None: it has none, since it is switched off."""
        return None

    def describe_cache(self, observer: CacheObserver | None, view: View, now: float) -> Mapping[str, object]:
        """Keys it adds to an answer of the admin listener, also where it is switched off (None)."""
        return {}

    def find_chat_form(self, kind: RequestKind, sglang: bool) -> ChatForm | None:
        """Return what makes a chat of requests of a kind to SGLang or vLLM, so that it can be tokenized; None: it has
        nothing."""
        return None


def find_chat_form(features: Iterable[CacheFeature], kind: RequestKind, sglang: bool) -> ChatForm | None:
    """Return the form of the first feature that has one."""
    forms = (feature.find_chat_form(kind, sglang) for feature in features)
    return next((form for form in forms if form is not None), None)


def find_reports(settings: KvCacheSettings) -> FollowsReports | None:
    """Return how engines' reports are followed under these settings: as the first installed feature does."""
    found = (feature.follow_reports(settings) for feature in installed(CacheFeature))
    return next((one for one in found if one is not None), None)


class CacheObservers:
    """The observers of one service by feature, with their hooks resolved once: a hook that none has costs nothing."""

    def __init__(self, features: Sequence[CacheFeature], parts: CacheParts) -> None:
        self._features = features
        made = ((feature.name, feature.observe_cache(parts)) for feature in features)
        self.by_feature = {name: one for name, one in made if one is not None}
        self.lifetimes = [one.lifetime for one in self.by_feature.values() if one.lifetime is not None]
        self.watches: Sequence[Callable[[RequestFacts], RequestWatch | None]] = self._resolve("watch")
        self.ticks: Sequence[Callable[[], None]] = self._resolve("tick")
        self.learned: Sequence[Callable[[RequestFacts, Result], None]] = self._resolve("learned")
        self.on_tokens: Sequence[OnTokens] = self._resolve("tokens_known")

    def find(self, kind: type[Observer]) -> Observer | None:
        """Return the observer of this class; None: its feature is off."""
        return next((one for one in self.by_feature.values() if isinstance(one, kind)), None)

    def bind_gauges(self, metrics: Metrics) -> None:
        for one in self.by_feature.values():
            one.bind_gauges(metrics)

    def close(self) -> None:
        """Close all observers with their service."""
        for one in self.by_feature.values():
            one.close()

    def describe(self, view: View, now: float) -> dict[str, object]:
        """Keys that all installed features add to an answer."""
        described: dict[str, object] = {}
        for feature in self._features:
            described |= feature.describe_cache(self.by_feature.get(feature.name), view, now)
        return described

    def _resolve(self, hook: str) -> Sequence[Any]:
        own = getattr(CacheObserver, hook)
        return [getattr(one, hook) for one in self.by_feature.values() if getattr(type(one), hook) is not own]


def find_needs(features: Iterable[CacheFeature], settings: KvCacheSettings) -> CacheNeeds:
    """Return the features' combined needs."""
    found = [feature.needs(settings) for feature in features]
    return CacheNeeds(*map(any, zip(*found, strict=True))) if found else CacheNeeds()
