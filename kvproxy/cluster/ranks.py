"""Data-parallel ranks of an engine that requests may name, and the engine's numbers for them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import StrEnum

from kvproxy.cluster.settings import DataParallelSettings

#: Refusals that do not name the rank, after which it is dropped all the same.
DOUBTS = 3
#: Bound on the ranks of one engine; a larger deployment has several front ends.
MAX_RANKS = 256


class RankRefusal(StrEnum):
    """Reaction to a rank that an engine refused; a metric label."""

    RENUMBERED = "renumbered"  # the engine counts from its own first rank, and is sent such numbers from now on
    DROPPED = "dropped"  # no longer a candidate
    DOUBTED = "doubted"  # the error does not name the rank: no reaction yet
    LATE = "late"  # a late answer to a number no longer sent


class Ranks:
    """The ranks of one engine, by the configuration, or by two sources of its own that agree.

    Ranks are numbered over all servers of a deployment, as in metrics and KV events. Front ends differ in what they
    take a request's rank for: that number, or its place among their own ranks (vLLM's in Python, under hybrid
    balancing). Where the two differ the first is tried first.
    """

    __slots__ = ("_doubts", "_first", "_found", "_refused", "_settings", "candidates", "in_body", "named", "shown")

    def __init__(self, settings: DataParallelSettings) -> None:
        self._settings = settings
        self._found: tuple[int, ...] = ()
        self._refused: frozenset[int] = frozenset()
        self._doubts: Counter[int] = Counter()
        self._first = 0  # subtracted from a rank to get its number
        self.in_body = False  # requests name their rank in the body, too
        self.shown: tuple[int, ...] = ()  # from its metrics, if several
        #: From its event sources, or as configured for them; None: not queried.
        self.named: tuple[int, ...] | None = None
        #: Ranks to choose among; () if the engine is one candidate.
        self.candidates: tuple[int, ...] = ()
        self._choose()

    def configure(self, settings: DataParallelSettings) -> None:
        """Apply the configured ranks. Changed ranks lose their record of refusals."""
        if settings != self._settings:
            self._settings = settings
            self.forget_refusals()

    @property
    def stated(self) -> tuple[int, ...]:
        """By the configuration."""
        return tuple(sorted(self._settings.ranks))

    @property
    def asks(self) -> bool:
        """True if the ranks have to be discovered."""
        return self._settings.steer and not self._settings.ranks

    @property
    def refused(self) -> tuple[int, ...]:
        """Ranks that the engine refuses."""
        return tuple(sorted(self._refused))

    @property
    def unknown(self) -> bool:
        """True if the metrics show several ranks, but their numbers are not confirmed."""
        return self.asks and bool(self.shown) and not self._found

    def number(self, rank: int) -> int:
        """Return what the engine calls this rank in a request."""
        return rank - self._first

    def observe_sources(self, shown: Collection[int], named: Collection[int] | None) -> None:
        """Record the ranks in the metrics and those in the event sources: if both agree on several, they are the
        ranks."""
        self.shown = tuple(sorted(shown)[:MAX_RANKS]) if len(shown) > 1 else ()
        self.named = None if named is None else tuple(sorted(named))
        found = self.shown if self.shown == self.named else ()
        if found != self._found:
            self._found = found
            self._refused = frozenset()
            self._choose()

    def resume_ranks(self, found: Collection[int]) -> None:
        """Restore the ranks of an earlier life until the engine reports its own."""
        if self.asks and not self.shown:
            self._found = tuple(sorted(found)[:MAX_RANKS])
            self._choose()

    def record_refusal(self, rank: int, number: int, *, named: bool = True) -> RankRefusal:
        """Record that the engine refused a request with this rank's number and served it without one. `named`: the
        error named the rank as the reason."""
        if rank in self._refused or rank not in self.candidates or number != self.number(rank):
            return RankRefusal.LATE
        self._doubts[rank] += 1
        if not named and self._doubts[rank] < DOUBTS:
            return RankRefusal.DOUBTED
        first = min(self.stated or self._found)
        if first and not self._first:
            self._first = first
            return RankRefusal.RENUMBERED
        self._refused |= {rank}
        self._choose()
        return RankRefusal.DROPPED

    def forget_refusals(self) -> None:
        """Forget all refusals: the engine may be another one now."""
        self._refused = frozenset()
        self._first = 0
        self._doubts.clear()
        self._choose()

    def _choose(self) -> None:
        ranks = (self.stated or self._found) if self._settings.steer else ()
        self.candidates = tuple(rank for rank in ranks if rank not in self._refused)
