"""One pass of the enabled strategies after each response; what each decides is done at the store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.feature import CacheParts
from kvproxy.cache.store import Action, ActionKind, HotPin, KvStore
from kvproxy.features.lmcache.cold_prefixes import ColdPrefixes, PrefixPriorities
from kvproxy.features.lmcache.pressure import PressureGauge
from kvproxy.features.lmcache.settings import strategy_of
from kvproxy.features.lmcache.strategies import Compress, Evict, Pin, RecordState, Served, Strategy


class StrategyRunner:
    """Compress, then pin, then evict: those that are enabled."""

    def __init__(self, parts: CacheParts, store: KvStore) -> None:
        settings = strategy_of(parts.settings)
        hotness = parts.actions.hotness
        record = parts.state.of(RecordState).record_at(store.address)
        self._store = store
        self._clock = parts.clock
        self._lease_s = settings.pin_lease
        self._cold = ColdPrefixes(settings, hotness, parts.state.of(PrefixPriorities).by_key)
        self.pressure = PressureGauge(settings, clusters=parts.clusters, engines=parts.signals, store=store)
        self.pin = Pin(settings, hotness, record, supports=lambda: store.supported)
        compress = Compress(settings, self._cold, record)
        evict = Evict(settings, hotness, self._cold, record, supports=lambda: store.supported)
        every: list[tuple[bool, Strategy, tuple[ActionKind, ...]]] = [
            (settings.enable_compression, compress, (ActionKind.COMPRESS, ActionKind.DECOMPRESS)),
            (settings.enable_pinning, self.pin, (ActionKind.PIN, ActionKind.UNPIN)),
            (settings.enable_eviction, evict, (ActionKind.EVICT, ActionKind.CLEAR)),
        ]
        self._strategies = [strategy for is_on, strategy, _ in every if is_on]
        for is_on, strategy, kinds in every:
            if is_on:
                store.adopted |= dict.fromkeys(kinds, strategy.done)

    def plan(self, used: Sequence[KnownPrefix], instance: str) -> None:
        """Decide on a prompt with these prefixes that was served at the instance, and queue the actions."""
        now = self._clock()
        taken = {one.head for one in used if one.tokens}
        taken |= {pin.prefix.head for pin in self.list_pins(now).values()}
        for strategy in self._strategies:
            for action in strategy.plan(Served(instance, used), self.pressure.find_pressure, taken, now):
                self._submit(action, strategy)

    def undo(self, keys: Sequence[int], instance: str) -> bool:
        """Undo what must be undone at the instance (a prefix is compressed there) before a prompt with these keys is
        served from there; True if there is anything."""
        undone = False
        for strategy in self._strategies:
            for action in strategy.plan_undoing(keys, instance):
                self._submit(action, strategy)
                undone = True
        return undone

    def tick(self, instances: Collection[str]) -> None:
        """Between requests: forget instances other than these, and renew pins that are due."""
        self.pressure.tick()
        for strategy in self._strategies:
            for action in strategy.tick(instances, self._clock()):
                self._submit(action, strategy)

    def list_pins(self, now: float) -> Mapping[tuple[str, int], HotPin]:
        """Return the pins of all strategies, by instance and prefix key."""
        return {where: pin for strategy in self._strategies for where, pin in strategy.list_pins(now).items()}

    def describe_pins(self, now: float) -> list[dict[str, object]]:
        """Return the pins that stand, as plain data for people."""
        lasts_s = None if self.pin.counted else self._lease_s
        return [
            {
                "instance": instance,
                "prefix": one.prefix.name,
                "model": one.prefix.model,
                "tokens": one.tokens,
                "age_s": now - one.pinned_at,
                "lapses_in_s": None if lasts_s is None else lasts_s - (now - one.pinned_at),
            }
            for (instance, _), one in self.pin.list_pins(now).items()
        ]

    def _submit(self, action: Action, strategy: Strategy) -> None:
        """With the score that the prefix has now."""
        if action.prefix is not None:
            action = replace(action, score=self._cold.score(action.prefix, self._clock()))
        self._store.submit(action, strategy.done)
