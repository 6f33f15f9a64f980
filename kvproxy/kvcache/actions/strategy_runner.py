"""One pass after each response: compress, then pin, then evict - what each decides goes to the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvproxy.clients.tokens import TokenIds
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.kvcache.actions.compress import Compress
from kvproxy.kvcache.actions.evict import Evict
from kvproxy.kvcache.actions.executor import ActionExecutor
from kvproxy.kvcache.actions.hotness import Hotness, KnownPrefix
from kvproxy.kvcache.actions.pin import Pin
from kvproxy.kvcache.actions.signals import Pressure, Signals
from kvproxy.kvcache.actions.strategy import Served, Strategy
from kvproxy.kvcache.overlap.facts import RequestFacts
from kvproxy.kvcache.overlap.lookup import LookupClient
from kvproxy.kvcache.overlap.merge import HolderOverlap
from kvproxy.kvcache.providers import ActionKind
from kvproxy.types import Clock, EndpointId


class StrategyRunner:
    """The strategies that are switched on, and what they know of prefixes."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        actions: ActionExecutor,
        signals: Signals,
        lookups: LookupClient,
        endpoints: Callable[[], Iterable[Endpoint]],
        clock: Clock,
    ) -> None:
        strategy = settings.cache_strategy
        self.hotness = Hotness(
            window_s=settings.hot_window, max_records=settings.hot_max_records, max_keys=settings.hot_max_keys
        )
        self.pin = Pin(strategy, self.hotness) if strategy.enable_pinning else None
        self.compress = Compress(strategy, self.hotness) if strategy.enable_compression else None
        self.evict = Evict(strategy, self.hotness, supports=self._supports) if strategy.enable_eviction else None
        self._order: Sequence[Strategy] = [one for one in (self.compress, self.pin, self.evict) if one is not None]
        self.actions = actions
        self._signals = signals
        self._lookups = lookups
        self._endpoints = endpoints
        self._clock = clock

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do after a response."""
        return bool(self._order) and self._lookups.provider is not None

    def use(self, gathered: RequestFacts, endpoint: Endpoint) -> list[KnownPrefix]:
        """Count the use of this prompt's prefixes."""
        salt = gathered.request.cache_salt or ""
        keys = gathered.keys
        return self.hotness.use(
            keys, model=gathered.model, cache_salt=salt, instance=endpoint.instance_id, now=self._clock()
        )

    def consider(self, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint) -> None:
        """The prompt with these prefixes was served there, and its KV exists: decide and queue."""
        self.hotness.learn(used, tokens)
        now = self._clock()
        served = Served(endpoint.instance_id, used)
        taken = {one.head for one in used if one.tokens}
        if self.pin is not None:
            taken |= self.pin.heads(now)
        for strategy in self._order:
            for action in strategy.plan(served, self._pressure, taken, now):
                self.actions.submit(action, strategy)

    def tick(self) -> None:
        """Between requests: renew leases that are due."""
        if self.pin is None or self._lookups.provider is None:
            return
        self.pin.counted = ActionKind.UNPIN in self._lookups.provider.supports
        for action in self.pin.tick(self._clock()):
            self.actions.submit(action, self.pin)

    def usable(self, gathered: RequestFacts, claims: Sequence[HolderOverlap]) -> list[HolderOverlap]:
        """The claims without those on prefixes that are compressed there; these are being decompressed from now on."""
        if self.compress is None or not self.compress.compressed:
            return list(claims)
        keys = gathered.keys
        instances = {endpoint.id: endpoint.instance_id for endpoint in gathered.endpoints}
        return [claim for claim in claims if not self._decompress(claim.endpoint, keys, instances)]

    def _decompress(self, endpoint: EndpointId, keys: Sequence[int], instances: dict[EndpointId, str]) -> bool:
        assert self.compress is not None
        actions = self.compress.decompressions(keys, instances[endpoint])
        for action in actions:
            self.actions.submit(action, self.compress)
        return bool(actions)

    def _pressure(self, instance: str) -> Pressure:
        """The fullest and busiest of the endpoints under this instance id; nothing is known of a strange one."""
        readings = [self._signals.pressure(one) for one in self._endpoints() if one.instance_id == instance]
        return Pressure(
            max((one.load for one in readings if one.load is not None), default=None),
            max((one.memory for one in readings if one.memory is not None), default=None),
        )

    def _supports(self) -> frozenset[ActionKind]:
        provider = self._lookups.provider
        return frozenset() if provider is None else provider.supports
