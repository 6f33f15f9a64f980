"""Strategies that keep KV cache useful: pin, compress, evict. One class each, all decisions, no I/O."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvproxy.base.bounded import BoundedMapping
from kvproxy.cache.actions.hotness import EDGE_PREFIXES, Hotness, KnownPrefix
from kvproxy.cache.store import Action, ActionKind, HotPin
from kvproxy.features.lmcache.cold_prefixes import ColdPrefixes
from kvproxy.features.lmcache.pressure import Pressure
from kvproxy.features.lmcache.settings import StrategySettings

log = logging.getLogger("kvproxy.kvcache")

#: Current pressure on an instance.
PressureOf = Callable[[str], Pressure]


@dataclass(frozen=True, slots=True)
class Served:
    """A response that just ended, and the prefixes of its prompt, shortest first."""

    instance_id: str
    prefixes: Sequence[KnownPrefix]


#: Actions that the service supports at present.
Supports = Callable[[], frozenset[ActionKind]]

#: Eviction ends where memory use is this much below its threshold.
MEMORY_HYSTERESIS = 0.1
#: Shorter prefixes are not compressed: little would be won, and to use them again they are decompressed.
COMPRESS_MIN_TOKENS = 2048
#: Compressed prefixes remembered; one that is forgotten is never decompressed, as if the proxy had restarted.
MAX_REMEMBERED = 10_000


class Strategy:
    """Decides what is done at LMCache, on what was just served and between requests. Every hook has a default that does
    nothing."""

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> Sequence[Action]:
        """Return what to do after a response. `taken` holds the heads of prefixes that are not to be dropped or shrunk
        in this pass; a strategy adds those it acts on, so that no prefix is pinned and evicted at once."""
        return ()

    def plan_undoing(self, keys: Sequence[int], instance: str) -> Sequence[Action]:
        """Return what must be undone at the instance before a prompt with these message prefixes is served from
        there."""
        return ()

    def tick(self, instances: Collection[str], now: float) -> Sequence[Action]:
        """Forget instances other than these, and return what to do between requests."""
        return ()

    def done(self, action: Action, now: float) -> None:
        """Record that an action had its effect, by whichever proxy."""

    def list_pins(self, now: float) -> Mapping[tuple[str, int], HotPin]:
        """Return the pins that stand, by instance and prefix key."""
        return {}


class ActionRecord:
    """Actions in effect at LMCache, by instance."""

    def __init__(self) -> None:
        self.pins: dict[tuple[str, int], HotPin] = {}  # by instance and prefix key, as the next
        self.compressed: BoundedMapping[tuple[str, int], KnownPrefix] = BoundedMapping(MAX_REMEMBERED)
        self.cleared_at: dict[str, float] = {}
        self.short: set[str] = set()  # instances short of memory, until they are well below the threshold

    def keep_only(self, instances: Collection[str]) -> None:
        """Forget when all others were cleared, and how full they are; pins lapse by themselves."""
        self.short.intersection_update(instances)
        for instance in self.cleared_at.keys() - set(instances):
            del self.cleared_at[instance]


class RecordState:
    """The record of the LMCache that acts now; it outlives a reload, or nothing would ever undo what was done."""

    def __init__(self) -> None:
        self._record = ActionRecord()
        self._at = ""

    def record_at(self, lmcache: str) -> ActionRecord:
        """Return what is in effect at this LMCache."""
        if self._at != lmcache:
            self._at = lmcache
            self._record = ActionRecord()
        return self._record


class Pin(Strategy):
    """Where the service takes pins back, it counts them and keeps them until then: a renewal sends nothing, and a pin
    that ends does."""

    def __init__(
        self,
        settings: StrategySettings,
        hotness: Hotness,
        record: ActionRecord | None = None,
        *,
        supports: Supports = frozenset,
    ) -> None:
        self._settings = settings
        self._hotness = hotness
        self._supports = supports
        self._pins = (record or ActionRecord()).pins

    @property
    def counted(self) -> bool:
        """True if the service counts pins."""
        return ActionKind.UNPIN in self._supports()

    def list_pins(self, now: float) -> dict[tuple[str, int], HotPin]:
        return {where: one for where, one in self._pins.items() if not self._lapsed(one, now)}

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.pin_instance_id or served.instance_id
        longest = next((one for one in reversed(served.prefixes) if one.actionable and self._hot(one, now)), None)
        if longest is None:
            return []
        taken.add(longest.head)
        pin = self._pins.get((instance, longest.key))
        if pin is not None and not self._lapsed(pin, now) and not self._due(pin, now):
            return []
        if self._held_tokens(instance, longest.key, now) + len(longest.tokens) > self._settings.pin_max_tokens:
            return []
        return [Action(ActionKind.PIN, instance, longest, "hot" if pin is None else "renewal")]

    def tick(self, instances: Collection[str], now: float) -> list[Action]:
        """Return renewals that no request brings about, and the end of counted pins that are hot no more."""
        actions = []
        counted = self.counted
        for (instance, key), pin in list(self._pins.items()):
            hot = self._hot(pin.prefix, now)
            if hot and self._due(pin, now) and not self._lapsed(pin, now):
                if counted:
                    pin.pinned_at = now
                elif pin.prefix.tokens:  # else another proxy pinned it, and renews it
                    actions.append(Action(ActionKind.PIN, instance, pin.prefix, "renewal"))
            elif counted and not hot and self._due(pin, now) and pin.prefix.tokens:
                pin.pinned_at = now  # undone once, also where the service of an earlier configuration still runs
                actions.append(Action(ActionKind.UNPIN, instance, pin.prefix, "cold"))
            elif not counted and self._lapsed(pin, now):
                del self._pins[instance, key]
        return actions

    def done(self, action: Action, now: float) -> None:
        assert action.prefix is not None
        where = (action.instance_id, action.prefix.key)
        if action.kind is ActionKind.UNPIN:
            self._pins.pop(where, None)
        else:
            self._pins[where] = HotPin(action.prefix, len(action.prefix.tokens), now)

    def _hot(self, prefix: KnownPrefix, now: float) -> bool:
        return self._hotness.count_recent_uses(prefix, now) >= self._settings.hot_content_threshold

    def _due(self, pin: HotPin, now: float) -> bool:
        return now - pin.pinned_at >= self._settings.pin_renewal_s

    def _lapsed(self, pin: HotPin, now: float) -> bool:
        return not self.counted and now - pin.pinned_at >= self._settings.pin_lease

    def _held_tokens(self, instance: str, besides: int, now: float) -> int:
        """Tokens pinned at the instance, but for those of one prefix."""
        running = self.list_pins(now).items()
        return sum(pin.tokens for (where, key), pin in running if where == instance and key != besides)


#: Message prefixes looked up of one prompt besides its first ones, the longest: earlier turns end in one of them.
MAX_LOOKED_UP = 256


class Compress(Strategy):
    """`compressed` is what was compressed and not yet decompressed, by instance and prefix key."""

    def __init__(self, settings: StrategySettings, cold: ColdPrefixes, record: ActionRecord | None = None) -> None:
        self._settings = settings
        self._cold = cold
        self.compressed = (record or ActionRecord()).compressed

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.compress_instance_id or served.instance_id
        load = pressure(instance).load
        if load is None or load < self._settings.load_threshold:
            return []
        done = {key for where, key in self.compressed if where == instance}
        cold = self._cold.choose(instance, taken=taken, now=now, least_tokens=COMPRESS_MIN_TOKENS, skip=done)
        taken.update(one.head for one in cold)
        return [Action(ActionKind.COMPRESS, instance, one, f"load {load:.2f}") for one in cold]

    def plan_undoing(self, keys: Sequence[int], instance: str) -> list[Action]:
        """Return decompressions."""
        compressed = self.compressed
        if not compressed:
            return []
        near = [*keys[:EDGE_PREFIXES], *keys[EDGE_PREFIXES:][-MAX_LOOKED_UP:]]
        found = [compressed[instance, key] for key in near if (instance, key) in compressed]
        return [Action(ActionKind.DECOMPRESS, instance, prefix, "wanted again") for prefix in found]

    def done(self, action: Action, now: float) -> None:
        assert action.prefix is not None
        where = (action.instance_id, action.prefix.key)
        if action.kind is ActionKind.COMPRESS:
            self.compressed[where] = action.prefix
        else:
            self.compressed.pop(where, None)


#: A location that was cleared is not cleared again sooner: it takes traffic to fill.
CLEAR_PAUSE_S = 60.0


class Evict(Strategy):
    """A real LMCache controller evicts no single prefix: that is logged once, and whole locations are cleared only with
    the operator's permission."""

    def __init__(
        self,
        settings: StrategySettings,
        hotness: Hotness,
        cold: ColdPrefixes,
        record: ActionRecord | None = None,
        *,
        supports: Supports,
    ) -> None:
        self._settings = settings
        self._hotness = hotness
        self._cold = cold
        self._supports = supports
        self._record = record or ActionRecord()
        self._said = False

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.evict_instance_id or served.instance_id
        memory = pressure(instance).memory
        if memory is None or not self._is_short(instance, memory):
            return []
        reason = f"memory {memory:.2f}"
        if ActionKind.EVICT not in self._supports():
            return self._clear(instance, reason, now)
        cold = self._cold.choose(instance, taken=taken, now=now)
        taken.update(one.head for one in cold)
        return [Action(ActionKind.EVICT, instance, one, reason) for one in cold]

    def done(self, action: Action, now: float) -> None:
        if action.prefix is None:
            self._hotness.note_emptied(action.instance_id)
        else:
            action.prefix.instances.discard(action.instance_id)

    def tick(self, instances: Collection[str], now: float) -> Sequence[Action]:
        self._record.keep_only(instances)
        return ()

    def _is_short(self, instance: str, memory: float) -> bool:
        """From the threshold on, until it is so much below that evicting need not begin again at once."""
        short = self._record.short
        limit = self._settings.memory_threshold
        if memory >= limit:
            short.add(instance)
        elif memory < limit - MEMORY_HYSTERESIS:
            short.discard(instance)
        return instance in short

    def _clear(self, instance: str, reason: str, now: float) -> list[Action]:
        allowed = self._settings.allow_clear and ActionKind.CLEAR in self._supports()
        if not self._said:
            self._said = True
            instead = "whole locations are cleared instead" if allowed else "nothing is evicted (see allow_clear)"
            log.warning("[kvcache] this LMCache cannot evict a single prefix: %s", instead)
        if not allowed or now - self._record.cleared_at.get(instance, -math.inf) < CLEAR_PAUSE_S:
            return []
        self._record.cleared_at[instance] = now
        return [Action(ActionKind.CLEAR, instance, None, reason)]
