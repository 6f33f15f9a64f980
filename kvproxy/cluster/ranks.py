"""Which data-parallel ranks an engine has that requests may ask for, and the numbers it knows them by. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import StrEnum

from kvproxy.cluster.settings import DataParallelSettings

#: Refusals without a word of the rank, by which it is dropped all the same.
DOUBTS = 3
#: Ranks followed of one engine; a larger deployment has several front ends.
MAX_RANKS = 256


class RankRefusal(StrEnum):
    """What is done about a rank that an engine refused; a metric label."""

    RENUMBERED = "renumbered"  # it counts from its own first rank: asked so from now on
    DROPPED = "dropped"  # it is no candidate any more
    DOUBTED = "doubted"  # the engine does not say that it is for the rank: nothing, as yet
    LATE = "late"  # the answer to what is not sent any more


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
        self.in_body = False  # requests name theirs in the body, too
        self.shown: tuple[int, ...] = ()  # by its metrics, if several
        #: By its event sources, or what is configured of them; None: they were not asked.
        self.named: tuple[int, ...] | None = None
        #: The ranks that are chosen among; () where the engine is one candidate.
        self.candidates: tuple[int, ...] = ()
        self._choose()

    def configure(self, settings: DataParallelSettings) -> None:
        """Take over what the configuration says. Other ranks than before have not been refused yet."""
        if settings != self._settings:
            self._settings = settings
            self.forget_refusals()

    @property
    def stated(self) -> tuple[int, ...]:
        """By the configuration."""
        return tuple(sorted(self._settings.ranks))

    @property
    def asks(self) -> bool:
        """Whether they are to be found out."""
        return self._settings.steer and not self._settings.ranks

    @property
    def refused(self) -> tuple[int, ...]:
        """Ranks that the engine does not know."""
        return tuple(sorted(self._refused))

    @property
    def unknown(self) -> bool:
        """Whether it has several by its metrics, and nothing else says which requests may ask for."""
        return self.asks and bool(self.shown) and not self._found

    def number(self, rank: int) -> int:
        """Return what the engine calls this rank in a request."""
        return rank - self._first

    def observe_sources(self, shown: Collection[int], named: Collection[int] | None) -> None:
        """What its metrics show now, and what its event sources name: where these are the same, and several, the ranks
        are known."""
        self.shown = tuple(sorted(shown)[:MAX_RANKS]) if len(shown) > 1 else ()
        self.named = None if named is None else tuple(sorted(named))
        found = self.shown if self.shown == self.named else ()
        if found != self._found:
            self._found = found
            self._refused = frozenset()
            self._choose()

    def resume_ranks(self, found: Collection[int]) -> None:
        """The ranks it had when it was last seen, until it is asked."""
        if self.asks and not self.shown:
            self._found = tuple(sorted(found)[:MAX_RANKS])
            self._choose()

    def record_refusal(self, rank: int, number: int, *, named: bool = True) -> RankRefusal:
        """Return the engine refused a request for the rank of this number, and served it without one. `named`: it said
        that it is for the rank."""
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
        """It may be another engine now: nothing has been refused."""
        self._refused = frozenset()
        self._first = 0
        self._doubts.clear()
        self._choose()

    def _choose(self) -> None:
        ranks = (self.stated or self._found) if self._settings.steer else ()
        self.candidates = tuple(rank for rank in ranks if rank not in self._refused)
