"""Pins hot prefixes. A pin is a lease: it lapses by itself, is renewed while the prefix stays hot, and has a budget."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.config.kvcache_schema import CacheStrategySettings
from kvproxy.kvcache.actions.hotness import Hotness, KnownPrefix
from kvproxy.kvcache.actions.strategy import Action, PressureOf, Served
from kvproxy.kvcache.providers import ActionKind


@dataclass(slots=True)
class Lease:
    """Tokens that are not evicted at one instance until the pin lapses."""

    prefix: KnownPrefix
    tokens: int
    pinned_at: float


class Pin:
    """`counted`: the service counts pins and keeps them until they are taken back, so a renewal sends nothing and a
    lease that ends does."""

    def __init__(self, settings: CacheStrategySettings, hotness: Hotness, *, counted: bool = False) -> None:
        self.counted = counted
        self._settings = settings
        self._hotness = hotness
        self._leases: dict[tuple[str, int], Lease] = {}

    def leases(self, now: float) -> dict[tuple[str, int], Lease]:
        """Running leases by instance and prefix key."""
        return {where: lease for where, lease in self._leases.items() if not self._lapsed(lease, now)}

    def heads(self, now: float) -> set[int]:
        """Heads of everything under a lease."""
        return {lease.prefix.head for lease in self.leases(now).values()}

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.pin_instance_id or served.instance_id
        longest = next((one for one in reversed(served.prefixes) if one.actionable and self._hot(one, now)), None)
        if longest is None:
            return []
        taken.add(longest.head)
        lease = self._leases.get((instance, longest.key))
        if lease is not None and not self._lapsed(lease, now) and not self._due(lease, now):
            return []
        if self._held_tokens(instance, longest.key, now) + len(longest.tokens) > self._settings.pin_max_tokens:
            return []
        return [Action(ActionKind.PIN, instance, longest, "hot" if lease is None else "renewal")]

    def tick(self, now: float) -> list[Action]:
        """Renewals that no request brings about, and the end of counted pins that are hot no more."""
        actions = []
        for (instance, key), lease in list(self._leases.items()):
            hot = self._hot(lease.prefix, now)
            if hot and self._due(lease, now) and not self._lapsed(lease, now):
                if self.counted:
                    lease.pinned_at = now
                else:
                    actions.append(Action(ActionKind.PIN, instance, lease.prefix, "renewal"))
            elif self.counted and not hot and self._due(lease, now):
                actions.append(Action(ActionKind.UNPIN, instance, lease.prefix, "cold"))
            elif not self.counted and self._lapsed(lease, now):
                del self._leases[instance, key]
        return actions

    def done(self, action: Action, now: float) -> None:
        assert action.prefix is not None
        where = (action.instance_id, action.prefix.key)
        if action.kind is ActionKind.UNPIN:
            self._leases.pop(where, None)
        else:
            self._leases[where] = Lease(action.prefix, len(action.prefix.tokens), now)

    def _hot(self, prefix: KnownPrefix, now: float) -> bool:
        return self._hotness.count(prefix, now) >= self._settings.hot_content_threshold

    def _due(self, lease: Lease, now: float) -> bool:
        return now - lease.pinned_at >= self._settings.pin_renewal

    def _lapsed(self, lease: Lease, now: float) -> bool:
        return not self.counted and now - lease.pinned_at >= self._settings.pin_lease

    def _held_tokens(self, instance: str, besides: int, now: float) -> int:
        """Tokens under lease at the instance, but for those of one prefix."""
        running = self.leases(now).items()
        return sum(lease.tokens for (where, key), lease in running if where == instance and key != besides)
