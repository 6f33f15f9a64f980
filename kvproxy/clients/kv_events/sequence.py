"""Where in a stream of numbered batches we are: what the next live batch means. Pure."""

from __future__ import annotations

from enum import Enum


class Continuity(Enum):
    """What a live batch is, relative to what was applied."""

    NEXT = "next"
    DUPLICATE = "duplicate"  # a replay brought it already
    GAP = "gap"  # batches before it are missing
    RESTART = "restart"  # the publisher counts anew: a new process


class Position:
    """The last batch applied, and the last one seen live.

    Two numbers, because after a replay the live stream still brings batches that were replayed already: those are
    duplicates, whereas a live number that falls back means a new process.
    """

    def __init__(self) -> None:
        self.applied: int | None = None  # -1: nothing was published yet; None: not known
        self.applied_ts = 0.0  # the engine's wall clock
        self._live: int | None = None

    def reset(self) -> None:
        """Nothing is known."""
        self.applied = self._live = None
        self.applied_ts = 0.0

    def advance(self, seq: int, ts: float) -> None:
        """Batch `seq` was applied."""
        self.applied = seq
        self.applied_ts = ts

    def judge(self, seq: int) -> Continuity:
        """What live batch `seq` is."""
        applied = -1 if self.applied is None else self.applied
        restarted = self._live is not None and seq <= self._live
        self._live = seq
        if restarted:
            return Continuity.RESTART
        if seq <= applied:
            return Continuity.DUPLICATE
        return Continuity.NEXT if seq == applied + 1 else Continuity.GAP
