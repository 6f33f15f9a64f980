"""Sessions that wait for room: whose room is kept for whom, and how soon others have some. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import cast

import msgspec

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Candidate, PickRequest

#: Sessions that got room of late, by which the rate is measured at which it becomes free.
_ADMITTED = 64
_RATE_KNOWN = 8


class Waiting(msgspec.Struct, eq=False):
    """One that waits."""

    request: PickRequest
    tokens: float  # of the room that it needs
    began_at: float
    begins: bool  # its session does
    reserved: EndpointId | None = None  # endpoint whose room is kept for it
    asked: tuple[int, int] = (0, 0)  # numbers of the latest questions whether there is room for it, the last one last

    def describe(self, now: float) -> dict[str, object]:
        """For people."""
        waited_s = round(now - self.began_at, 1)
        return {"waited_s": waited_s, "tokens": round(self.tokens), "begins": self.begins, "endpoint": self.reserved}


class WaitingLine:
    """Those of one cluster."""

    def __init__(self) -> None:
        self.waits: dict[Waiting, None] = {}
        self.kept: dict[EndpointId, tuple[Waiting, EndpointLoad]] = {}  # for whom, by endpoint
        self._asked = 0  # questions whether there is room
        self._granted = (0, 0.0)  # last block of the prompt that waited last, and for how many seconds
        self._waited_s = 0.0  # in which some waited, before those of now
        self._since = 0.0  # when the first of these began to
        #: Of those that got room of late, the seconds until then in which some waited, and tokens; first a beginning.
        self._admitted: deque[tuple[float, float]] = deque([(0.0, 0.0)], maxlen=_ADMITTED)

    def join(self, wait: Waiting) -> None:
        """Put one last."""
        if not self.waits:
            self._since = wait.began_at
        self.waits[wait] = None

    def leave(self, wait: Waiting, now: float) -> None:
        """Remove one, if it is there."""
        if wait in self.waits:
            del self.waits[wait]
            if not self.waits:
                self._waited_s += now - self._since
            self.release(wait)
            self._granted = wait.request.facts.blocks[-1], now - wait.began_at

    def ask(self, wait: Waiting) -> None:
        """Note a question whether there is room for one. No room is kept any more for those that were not asked while
        this one was twice: another went ahead of them."""
        before, last = wait.asked
        self._asked += 1
        wait.asked = last, self._asked
        for holder, _ in list(self.kept.values()):
            if holder.asked[1] < before:
                self.release(holder)

    def admit(self, wait: Waiting, now: float) -> None:
        """Note that there is room for one."""
        self._admitted.append((self._waited_s + now - self._since, wait.tokens))
        self.release(wait)

    def is_kept(self, one: Candidate, wait: Waiting | None) -> bool:
        """Return whether the room of an endpoint is kept for another one than this, here or by another router."""
        holder = self.kept.get(one.id)
        if holder is not None and holder[0] is not wait:
            return True
        return wait is None and is_kept_elsewhere(one, math.inf)

    def keep(self, wait: Waiting, best: Candidate | None, candidates: Sequence[Candidate]) -> None:
        """Keep for one the room of the endpoint that will first have enough, unless another one waits for room among
        these: what gets free elsewhere is the first one's too."""
        if wait.reserved is not None and all(one.id != wait.reserved for one in candidates):
            self.release(wait)  # that endpoint is not to be chosen at present
        if best is not None and not any(one.id in self.kept for one in candidates):
            load = cast("EndpointLoad", best.load)
            self.kept[best.id] = wait, load
            wait.reserved = best.id
            load.keep_room(wait.began_at)

    def release(self, wait: Waiting) -> None:
        """Keep no room for one any more."""
        if wait.reserved is not None:
            _, load = self.kept.pop(wait.reserved)
            load.keep_room(None)
            wait.reserved = None

    def waited_s(self, blocks: Sequence[int]) -> float:
        """Return for how long a prompt waited that is placed now."""
        granted, waited_s = self._granted
        return waited_s if granted == blocks[-1] else 0.0

    @property
    def knows_rate(self) -> bool:
        """Whether room became free often enough to tell how fast it does."""
        return len(self._admitted) > _RATE_KNOWN

    def expected_wait_s(self, now: float) -> float:
        """Seconds until a session that comes now has room, by the rate of late at which it became free while some
        waited; before that is known, what the first has waited."""
        first = next(iter(self.waits), None)
        if first is None:
            return 0.0
        if not self.knows_rate:
            return now - first.began_at
        (began_s, _), *admitted = self._admitted
        took_s = max(0.001, self._waited_s + now - self._since - began_s)
        return sum(wait.tokens for wait in self.waits) * took_s / sum(tokens for _, tokens in admitted)


def is_kept_elsewhere(one: Candidate, since: float) -> bool:
    """Return whether another router keeps the room of an endpoint for a session that came before `since`."""
    others = cast("EndpointLoad", one.load).remote_load
    return others is not None and others.kept_since < since
