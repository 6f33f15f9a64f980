"""Actions on cached prefixes, strategies that decide on them, and the choice of cold prefixes. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvproxy.cache.actions.hotness import Hotness, KnownPrefix
from kvproxy.cache.actions.signals import Pressure
from kvproxy.cache.prefix.eviction import Priority, Weights, score_use
from kvproxy.cache.providers import ActionKind
from kvproxy.cache.settings import CacheStrategySettings

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


#: Called with an action that had its effect, by whichever proxy, and the time.
OnDone = Callable[[Action, float], None]


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


@dataclass(slots=True)
class HotPin:
    """Tokens that are not evicted at one instance until the pin lapses."""

    prefix: KnownPrefix
    tokens: int
    pinned_at: float


#: Prefixes evicted, or compressed, after one response; memory is read again before the next ones.
BATCH = 4
#: Prefixes examined per pass to find those to act on.
LOOKED_AT = 256
#: Length that scores as neither long nor short.
TYPICAL_TOKENS = 4096


class ColdPrefixes:
    """Chooses, by one score, what is evicted and compressed."""

    def __init__(self, settings: CacheStrategySettings, hotness: Hotness, priorities: Mapping[int, Priority]) -> None:
        self._settings = settings
        self._hotness = hotness
        self._priorities = priorities  # by prefix key, as the operator set them
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


#: Prefixes that the operator may give a priority of their own.
MAX_PRIORITIES = 1024
