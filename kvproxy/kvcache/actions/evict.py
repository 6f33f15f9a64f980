"""Evicts the coldest prefixes while an instance is short of memory, as far as the service can."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvproxy.config.kvcache_schema import CacheStrategySettings
from kvproxy.kvcache.actions.cold import cold_prefixes
from kvproxy.kvcache.actions.hotness import Hotness
from kvproxy.kvcache.actions.strategy import Action, PressureOf, Served
from kvproxy.kvcache.providers import ActionKind

log = logging.getLogger("kvproxy.kvcache")

#: A location that was cleared is not cleared again sooner: it takes traffic to fill.
CLEAR_PAUSE_S = 60.0


class Evict:
    """`supports` says what the service can do at present. A real LMCache controller evicts no single prefix: that is
    said once, and whole locations are cleared only where the operator allows it."""

    def __init__(
        self, settings: CacheStrategySettings, hotness: Hotness, *, supports: Callable[[], frozenset[ActionKind]]
    ) -> None:
        self._settings = settings
        self._hotness = hotness
        self._supports = supports
        self._cleared_at: dict[str, float] = {}
        self._said = False

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.evict_instance_id or served.instance_id
        memory = pressure(instance).memory
        if memory is None or memory < self._settings.memory_threshold:
            return []
        reason = f"memory {memory:.2f}"
        if ActionKind.EVICT not in self._supports():
            return self._clear(instance, reason, now)
        cold = cold_prefixes(
            self._hotness, instance, hot_threshold=self._settings.hot_content_threshold, taken=taken, now=now
        )
        taken.update(one.head for one in cold)
        return [Action(ActionKind.EVICT, instance, one, reason) for one in cold]

    def done(self, action: Action, now: float) -> None:
        if action.prefix is None:
            self._hotness.emptied(action.instance_id)
        else:
            self._hotness.gone(action.prefix, action.instance_id)

    def _clear(self, instance: str, reason: str, now: float) -> list[Action]:
        allowed = self._settings.allow_clear and ActionKind.CLEAR in self._supports()
        if not self._said:
            self._said = True
            instead = "whole locations are cleared instead" if allowed else "nothing is evicted (see allow_clear)"
            log.warning("[kvcache] this LMCache cannot evict a single prefix: %s", instead)
        if not allowed or now - self._cleared_at.get(instance, -math.inf) < CLEAR_PAUSE_S:
            return []
        self._cleared_at[instance] = now
        return [Action(ActionKind.CLEAR, instance, None, reason)]
