"""Strategies that keep KV cache useful: pin, compress, evict. One class each, all decisions, no I/O."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from kvproxy.base.bounded import BoundedMapping
from kvproxy.cache.actions.hotness import EDGE_PREFIXES, Hotness, KnownPrefix
from kvproxy.cache.actions.signals import Pressure
from kvproxy.cache.prefix.eviction import Priority, Weights, score_use
from kvproxy.cache.providers import ActionKind
from kvproxy.cache.settings import CacheStrategySettings

log = logging.getLogger("kvproxy.kvcache")

#: Eviction ends where memory use is this much below its threshold.
MEMORY_HYSTERESIS = 0.1

#: Current pressure on an instance.
PressureOf = Callable[[str], Pressure]


@dataclass(frozen=True, slots=True)
class Served:
    """A response that just ended, and the prefixes of its prompt, shortest first."""

    instance_id: str
    prefixes: Sequence[KnownPrefix]


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be done at one instance. `prefix` None: to all it holds in a location. `source`: of a transfer, the
    instance that it comes from; "": what the target itself reads."""

    kind: ActionKind
    instance_id: str
    prefix: KnownPrefix | None
    reason: str
    score: float | None = None  # from 0, to be kept, to 1, to go first
    source: str = ""
    timeout_s: float | None = None  # after which it is worth nothing; None: as other background work
    own: bool = False  # of this process alone: not claimed or counted by another one


class Strategy(Protocol):
    """Decides after each response. `taken` holds the heads of prefixes that are not to be dropped or shrunk in this
    pass; a strategy adds those it acts on, so that no prefix is pinned and evicted at once."""

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        """Return what to do now."""
        ...

    def done(self, action: Action, now: float) -> None:
        """Record that an action of this strategy had its effect."""
        ...


#: Prefixes evicted, or compressed, after one response; memory is read again before the next ones.
BATCH = 4
#: Prefixes examined per pass to find those to act on.
LOOKED_AT = 256
#: Length that scores as neither long nor short.
TYPICAL_TOKENS = 4096


class ColdPrefixes:
    """Chooses, by one score, what is evicted and compressed."""

    def __init__(
        self, settings: CacheStrategySettings, hotness: Hotness, priorities: Mapping[int, Priority] | None = None
    ) -> None:
        self._settings = settings
        self._hotness = hotness
        self._priorities = {} if priorities is None else priorities  # by prefix key, as the operator set them
        self._weights = Weights()
        self._kept = {int(name, 16) for name in settings.keep_prefixes}

    def choose(
        self, instance: str, *, taken: set[int], now: float, least_tokens: int = 0, skip: Container[int] = ()
    ) -> list[KnownPrefix]:
        """Return a batch of prefixes at the instance, the highest score first, and what is promised to a client last.
        Cache entries are shared by prompts that begin alike, so nothing is touched whose head something hot, pinned,
        kept or just served has as well."""
        looked_at = list(islice(self._hotness.walk_coldest(instance), LOOKED_AT))
        hot = self._settings.hot_content_threshold
        protected = taken | {
            one.head
            for one in looked_at
            if self.priority(one, now) is Priority.OPERATOR or self._hotness.count_recent_uses(one, now) >= hot
        }
        found = [
            one
            for one in looked_at
            if one.head not in protected and one.key not in skip and len(one.tokens) >= least_tokens
        ]
        found.sort(key=lambda one: (self.priority(one, now), -self.score(one, now)))
        return found[:BATCH]

    def score(self, prefix: KnownPrefix, now: float) -> float:
        """From 0, to be kept, to 1, to go first."""
        use = self._hotness.recall_use(prefix, now)
        span_s = self._hotness.window_s
        return score_use(use, self._weights, span=span_s, size=TYPICAL_TOKENS)

    def priority(self, prefix: KnownPrefix, now: float) -> Priority:
        """Return its priority besides the score."""
        if prefix.key in self._kept:
            return Priority.OPERATOR
        promised = Priority.CONTRACT if prefix.promised_until > now else Priority.NORMAL
        return max(promised, self._priorities.get(prefix.key, Priority.NORMAL))


@dataclass(slots=True)
class HotPin:
    """Tokens that are not evicted at one instance until the pin lapses."""

    prefix: KnownPrefix
    tokens: int
    pinned_at: float


#: Prefixes that the operator may give a priority of their own.
MAX_PRIORITIES = 1024
#: Compressed prefixes remembered; one that is forgotten is never decompressed, as if the proxy had restarted.
MAX_REMEMBERED = 10_000


class ActionRecord:
    """Actions in effect at LMCache, by instance; kept over a reload, or nothing would ever undo them. The operator's
    priorities, by prefix key, are kept over a change of LMCache too."""

    def __init__(self, priorities: dict[int, Priority] | None = None) -> None:
        self.priorities = {} if priorities is None else priorities
        self.pins: dict[tuple[str, int], HotPin] = {}  # by instance and prefix key, as the next
        self.compressed: BoundedMapping[tuple[str, int], KnownPrefix] = BoundedMapping(MAX_REMEMBERED)
        self.cleared_at: dict[str, float] = {}
        self.short: set[str] = set()  # instances short of memory, until they are well below the threshold

    def keep_only(self, instances: Collection[str]) -> None:
        """Forget when all others were cleared, and how full they are; pins lapse by themselves."""
        self.short.intersection_update(instances)
        for instance in self.cleared_at.keys() - set(instances):
            del self.cleared_at[instance]


class Pin:
    """`counted`: the service counts pins and keeps them until they are taken back, so a renewal sends nothing and a
    pin that ends does."""

    def __init__(
        self,
        settings: CacheStrategySettings,
        hotness: Hotness,
        record: ActionRecord | None = None,
        *,
        counted: bool = False,
    ) -> None:
        self.counted = counted
        self._settings = settings
        self._hotness = hotness
        self._pins = (record or ActionRecord()).pins

    def pins(self, now: float) -> dict[tuple[str, int], HotPin]:
        """Return running pins by instance and prefix key."""
        return {where: one for where, one in self._pins.items() if not self._lapsed(one, now)}

    def heads(self, now: float) -> set[int]:
        """Heads of everything that is pinned."""
        return {pin.prefix.head for pin in self.pins(now).values()}

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

    def tick(self, now: float) -> list[Action]:
        """Renewals that no request brings about, and the end of counted pins that are hot no more."""
        actions = []
        for (instance, key), pin in list(self._pins.items()):
            hot = self._hot(pin.prefix, now)
            if hot and self._due(pin, now) and not self._lapsed(pin, now):
                if self.counted:
                    pin.pinned_at = now
                elif pin.prefix.tokens:  # else another proxy pinned it, and renews it
                    actions.append(Action(ActionKind.PIN, instance, pin.prefix, "renewal"))
            elif self.counted and not hot and self._due(pin, now) and pin.prefix.tokens:
                pin.pinned_at = now  # undone once, also where the service of an earlier configuration still runs
                actions.append(Action(ActionKind.UNPIN, instance, pin.prefix, "cold"))
            elif not self.counted and self._lapsed(pin, now):
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
        running = self.pins(now).items()
        return sum(pin.tokens for (where, key), pin in running if where == instance and key != besides)


#: Message prefixes looked up of one prompt besides its first ones, the longest: earlier turns end in one of them.
MAX_LOOKED_UP = 256


class Compress:
    """`compressed` is what was compressed and not yet decompressed, by instance and prefix key."""

    def __init__(self, settings: CacheStrategySettings, hotness: Hotness, record: ActionRecord | None = None) -> None:
        self._settings = settings
        record = record or ActionRecord()
        self._cold = ColdPrefixes(settings, hotness, record.priorities)
        self.compressed = record.compressed

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        instance = self._settings.compress_instance_id or served.instance_id
        load = pressure(instance).load
        if load is None or load < self._settings.load_threshold:
            return []
        done = {key for where, key in self.compressed if where == instance}
        least = self._settings.compress_min_tokens
        cold = self._cold.choose(instance, taken=taken, now=now, least_tokens=least, skip=done)
        taken.update(one.head for one in cold)
        return [Action(ActionKind.COMPRESS, instance, one, f"load {load:.2f}") for one in cold]

    def plan_decompressions(self, keys: Sequence[int], instance: str) -> list[Action]:
        """Return what must be undone at the instance before a prompt with these message prefixes is served
        from there."""
        compressed = self.compressed
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


class Evict:
    """Evict strategy. `supports` shows the actions the service supports now. A real LMCache controller evicts no single
    prefix: that is logged once, and whole locations are cleared only with the operator's permission."""

    def __init__(
        self,
        settings: CacheStrategySettings,
        hotness: Hotness,
        record: ActionRecord | None = None,
        *,
        supports: Callable[[], frozenset[ActionKind]],
    ) -> None:
        self._settings = settings
        self._hotness = hotness
        self._supports = supports
        self._record = record or ActionRecord()
        self._cold = ColdPrefixes(settings, hotness, self._record.priorities)
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
            self._hotness.note_gone(action.prefix, action.instance_id)

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
