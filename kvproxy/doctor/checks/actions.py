"""Can LMCache do what the strategies are told to?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvproxy.config.kvcache_schema import CacheStrategySettings, Provider
from kvproxy.doctor.finding import Finding, ok, warning
from kvproxy.doctor.lmcache import LmCache

_LOCATIONS = ("LocalCPUBackend", "LocalDiskBackend")


@dataclass(frozen=True, slots=True)
class ActionsCheck:
    """Strategies against the routes that this service has."""

    lmcache: LmCache

    name = "actions"
    calls = 5

    @property
    def where(self) -> str:
        return self.lmcache.where

    async def find(self) -> Sequence[Finding]:
        strategy = self.lmcache.settings.cache_strategy
        if not (strategy.enable_pinning or strategy.enable_compression or strategy.enable_eviction):
            return []
        kind = await self.lmcache.kind()
        found: list[Finding] = []
        if kind is Provider.CONTROLLER:
            evicts = not strategy.enable_eviction or await self.lmcache.evicts()
            found += controller_findings(self.where, strategy, evicts=evicts)
        elif strategy.enable_compression:
            fix = "set `enable_compression: false`"
            found.append(warning(self.where, "the coordinator has no compression: that strategy does nothing", fix))
        return found or [ok(self.where, "has what the strategies need")]


def controller_findings(where: str, strategy: CacheStrategySettings, *, evicts: bool) -> Iterator[Finding]:
    """What a controller cannot do of it."""
    if strategy.enable_eviction and not evicts and not strategy.allow_clear:
        fix = "set `allow_clear: true` to clear whole locations instead, use the coordinator, or leave eviction off"
        yield warning(where, "has no /evict (no LMCache controller has): eviction does nothing", fix)
    if strategy.enable_compression and strategy.compress_method != "cachegen":
        what = f"compresses with cachegen only: `compress_method: {strategy.compress_method}` has no effect"
        yield warning(where, what, "set `compress_method: cachegen`")
    for enabled, name in (
        (strategy.enable_pinning, "pin_location"),
        (strategy.enable_compression, "compress_location"),
        (strategy.enable_eviction and strategy.allow_clear, "evict_location"),
    ):
        location = getattr(strategy, name)
        if enabled and location not in _LOCATIONS:
            what = f"knows no location {location!r} (`{name}`): the action answers 200 and does nothing"
            yield warning(where, what, f"set `{name}` to {' or '.join(_LOCATIONS)}")
