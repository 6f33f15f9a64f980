"""Experiment on live traffic: whether an engine admits requests by their number. Pure.

No route of an engine reports its scheduling policy, and one that orders by arrival accepts the number without effect.
So two requests that wait together are compared. The first is any; the second, placed while the first waits, is put just
before or just behind it by the toss of a coin. The pair counts if both then waited for a while in which others got
their first token, and shows whether the one put ahead came first. In an engine that ignores the number this is so in
half of the pairs, whatever its own order: lengths, arrival, chunks. A sequential test ends it. It costs one request of
a pair the difference between its own place and its neighbour's; one pair runs at a time."""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random

#: Of the pairs, those in order: in an engine that pays no heed, and at least in one that does.
_HEEDLESS = 0.5
_HEEDING = 0.75
#: Errors of either kind.
_ERROR = 0.01
_ENOUGH = math.log((1 - _ERROR) / _ERROR)
_IN_ORDER = math.log(_HEEDING / _HEEDLESS)
_OUT_OF_ORDER = math.log((1 - _HEEDING) / (1 - _HEEDLESS))

#: Distance of the two in seconds of urgency: room for others between them.
GAP_S = 0.2
#: First tokens of others that must come while both wait.
_OTHERS = 2
#: Least wait of both: milliseconds may pass before a request even reaches the engine's scheduler.
LEAST_WAIT_S = 0.1
#: First tokens closer together than this came out of one step.
_SAME_STEP_S = 0.002


class Verdict(StrEnum):
    """Finding about an engine; a metric label."""

    UNKNOWN = "unknown"  # not enough was seen waiting together yet
    OBEYS = "obeys"
    IGNORES = "ignores"


class PriorityTrial:
    """The experiment on one engine. A request is any object that is the same at its placement and its first token."""

    __slots__ = (
        "_ahead",
        "_evidence",
        "_first",
        "_first_s",
        "_order",
        "_others",
        "_rng",
        "_second",
        "_second_at",
        "in_order",
        "pairs",
    )

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.pairs = 0
        self.in_order = 0
        self._evidence = 0.0
        self._first: object | None = None
        self._second: object | None = None
        self._first_s = 0.0  # the first one's urgency
        self._second_at = 0.0  # when the second one was placed
        self._ahead = False  # the second one was put ahead
        self._others = 0  # first tokens since both wait
        self._order: tuple[bool, float] | None = None  # whether the second one came first, and when

    @property
    def verdict(self) -> Verdict:
        """Verdict of the pairs so far, with at most one error in a hundred of either kind."""
        if self._evidence >= _ENOUGH:
            return Verdict.OBEYS
        return Verdict.IGNORES if self._evidence <= -_ENOUGH else Verdict.UNKNOWN

    def place(self, request: object, urgency: float, now: float) -> float:
        """Return the urgency that `request`, which will have to wait and whose first token will be seen, is
        sent with."""
        if self._first is None:
            self._first = request
            self._first_s = urgency
        elif self._second is None and self._order is None:
            self._second, self._second_at, self._ahead = request, now, self._rng.random() < 0.5
            return self._first_s - GAP_S if self._ahead else self._first_s + GAP_S
        return urgency

    def first_token(self, request: object, now: float) -> None:
        """Note the first token of a request of this engine, in the experiment or not."""
        if request is not self._first and request is not self._second:
            self._others += self._second is not None
        elif self._second is None:
            self.drop_pair()
        elif self._order is None:
            if self._others < _OTHERS or now - self._second_at < LEAST_WAIT_S:
                self.drop_pair()
            else:
                self._order = (request is self._second, now)
        else:
            second_came_first, at = self._order
            if now - at > _SAME_STEP_S:
                self._count(second_came_first is self._ahead)
            self.drop_pair()

    def ended(self, request: object) -> None:
        """Note the end of a request, possibly without a first token."""
        if request is not self._first and request is not self._second:
            return
        if self._order is None or request is not (self._second if self._order[0] else self._first):
            self.drop_pair()  # else it came first, and the other one is still awaited

    def _count(self, in_order: bool) -> None:
        self.pairs += 1
        self.in_order += in_order
        self._evidence += _IN_ORDER if in_order else _OUT_OF_ORDER

    def drop_pair(self) -> None:
        """Drop the current pair, which proves nothing."""
        self._first = self._second = self._order = None
        self._others = 0
