"""Learned state of the cache service; it outlives the machinery, which each reload builds again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.actions.hotness import Hotness
from kvproxy.cache.feedback.media_counts import MediaCounts
from kvproxy.cache.feedback.prediction_stats import PredictionStats
from kvproxy.cache.feedback.token_counts import BytesPerToken, CountedPrompts, HitRatioStats
from kvproxy.cache.feedback.trust import CacheLosses
from kvproxy.cache.overlap.index_state import IndexState
from kvproxy.cache.prefix.token_memory import TokenMemory
from kvproxy.cache.settings import KvCacheSettings, TokenCacheSettings
from kvproxy.cluster.endpoint import Endpoint

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class CacheState:
    """Two services may share one for a while: the one that drains and the one that follows on it.

    Heat of message prefixes and token memory are kept as long as their bounds in the settings stay the same.
    """

    predictions: PredictionStats
    losses: CacheLosses
    hit_ratios: HitRatioStats = field(default_factory=HitRatioStats)
    bytes_per_token: BytesPerToken = field(default_factory=BytesPerToken)
    counted: CountedPrompts = field(default_factory=CountedPrompts)
    media_counts: MediaCounts = field(default_factory=MediaCounts)
    indexes: dict[str, IndexState] = field(default_factory=dict)  # by cluster
    present: dict[str, Mapping[str, Endpoint]] = field(default_factory=dict)  # by cluster, at the last scrape
    #: Called with the model, the prompt's keys, its bytes and its tokens as counted by an engine.
    on_counted: Callable[[str, Sequence[int], int, int], None] | None = None
    fresh: bool = True  # no service has run with it: a saved state may still fill it
    _of_features: dict[type, object] = field(default_factory=dict)
    _hotness: Hotness | None = None
    _tokens: tuple[TokenCacheSettings, TokenMemory] | None = None

    @classmethod
    def empty(cls, *, metrics: Metrics, clock: Clock) -> CacheState:
        """Return the state of a first start."""
        predictions = PredictionStats(metrics, clock=clock)
        return cls(predictions, CacheLosses(metrics, clock=clock))

    def of(self, kind: type[T]) -> T:
        """Return a feature's own state, made on first use."""
        found = self._of_features.get(kind)
        if not isinstance(found, kind):
            found = self._of_features[kind] = kind()
        return found

    def index(self, cluster: str, *, endpoints: int) -> IndexState:
        """Return the cluster's index state, made on first use for this many endpoints."""
        known = self.indexes.get(cluster)
        if known is None:
            known = self.indexes[cluster] = IndexState(endpoints=endpoints)
        return known

    def learn_count(self, model: str, keys: Sequence[int], prompt_bytes: int, prompt_tokens: int) -> None:
        """Note a count that came to this proxy, and pass it on."""
        if self.on_counted is not None:
            self.on_counted(model, keys, prompt_bytes, prompt_tokens)
        self.note_count(model, keys, prompt_bytes, prompt_tokens)

    def note_count(self, model: str, keys: Sequence[int], prompt_bytes: int, prompt_tokens: int) -> None:
        """Note an engine's count of the tokens in a prompt of `model` with these keys."""
        self.bytes_per_token.observe_prompt(model, prompt_bytes, prompt_tokens)
        if keys:
            self.counted.note_prompt(keys, prompt_bytes, prompt_tokens)

    def hotness(self, settings: KvCacheSettings) -> Hotness:
        """Message prefixes by use."""
        if self._hotness is None or self._hotness.window_s != settings.hot_window:
            self._hotness = Hotness(window_s=settings.hot_window)
        return self._hotness

    def token_memory(self, settings: TokenCacheSettings, clock: Clock) -> TokenMemory:
        """Tokens of prompts by message prefix."""
        if self._tokens is None or self._tokens[0] != settings:
            limits = {"max_entries": settings.max_size} if settings.max_size else {}
            memory = TokenMemory(clock=clock, max_bytes=settings.max_bytes, ttl_s=settings.ttl, **limits)
            self._tokens = (settings, memory)
        return self._tokens[1]

    def keep_only(self, clusters: Mapping[str, object]) -> None:
        """Forget the indexes of all other clusters."""
        for known in (self.indexes, self.present):
            for name in known.keys() - clusters.keys():
                del known[name]
