"""Order in which prefixes go where memory is short or the load is high, by a score and by priorities. No I/O."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import islice

from kvproxy.cache.actions.hotness import Hotness, KnownPrefix
from kvproxy.cache.prefix.eviction import Priority, Use, Weights, score_use
from kvproxy.features.lmcache.settings import StrategySettings

#: Prefixes that the operator may give a priority of their own.
MAX_PRIORITIES = 1024


class PrefixPriorities:
    """Priorities that an operator set, by prefix key. They outlive a reload."""

    def __init__(self) -> None:
        self.by_key: dict[int, Priority] = {}

    def set_priority(self, key: int, priority: Priority) -> bool:
        """Set the priority of the prefix with this key, known or not; NORMAL: decided by its score and promises alone.
        False: too many have one."""
        if priority is Priority.NORMAL:
            self.by_key.pop(key, None)
        elif key in self.by_key or len(self.by_key) < MAX_PRIORITIES:
            self.by_key[key] = priority
        else:
            return False
        return True


#: Prefixes evicted, or compressed, after one response; memory is read again before the next ones.
BATCH = 4
#: Prefixes examined per pass to find those to act on.
LOOKED_AT = 256
#: Length that scores as neither long nor short.
TYPICAL_TOKENS = 4096


class ColdPrefixes:
    """Chooses, by one score, what is evicted and compressed."""

    def __init__(self, settings: StrategySettings, hotness: Hotness, priorities: Mapping[int, Priority]) -> None:
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
        use = recall_use(self._hotness, prefix, now)
        span_s = self._hotness.window_s
        return score_use(use, self._weights, span=span_s, size=TYPICAL_TOKENS)

    def priority(self, prefix: KnownPrefix, now: float) -> Priority:
        """Return its priority besides the score."""
        if prefix.key in self._kept:
            return Priority.OPERATOR
        promised = Priority.CONTRACT if prefix.promised_until > now else Priority.NORMAL
        return max(promised, self._priorities.get(prefix.key, Priority.NORMAL))


def recall_use(hotness: Hotness, prefix: KnownPrefix, now: float) -> Use:
    """How it was used within the window, which is how long ago an earlier use is taken to be."""
    count = hotness.count_recent_uses(prefix, now)
    uses = prefix.uses
    idle_s = now - uses[-1] if count else hotness.window_s
    gap_s = (uses[-1] - uses[0]) / (count - 1) if count > 1 else hotness.window_s
    return Use(count, len(prefix.tokens), idle_s, gap_s)
