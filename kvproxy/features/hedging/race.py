"""One request that may be sent to a second endpoint, and the answer that comes first.

The second is sent once the wait beyond what was expected at the first exceeds what the prompt would cost elsewhere, and
what was expected: estimates are often half wrong, and each prompt that is computed twice makes others late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import msgspec

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import PoolFull
from kvproxy.base.types import Clock
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.costs import own_s, wait_s
from kvproxy.cluster.routing.selector import PANIC, Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.screening import Refusal
from kvproxy.features.hedging.metrics import HedgeMetrics
from kvproxy.features.hedging.note import FAILED, LEFT, LOST, NOTE, REFUSED, WON, HedgeNote
from kvproxy.proxy.forward.engine_request import Answer, EngineRequest

#: Shortest time between two looks at the other endpoints, and least lateness: less is no sign of anything.
TICK_S = 0.02
LEAST_LATE_S = 0.25
#: First tokens from which on learned speeds are trusted: before, every answer may seem late.
LEARNED = 50


class Hedger:
    """Of one cluster."""

    def __init__(self, cluster: Cluster, *, metrics: HedgeMetrics, clock: Clock) -> None:
        self.cluster = cluster
        self.metrics = metrics
        self.clock = clock

    def race(
        self, request: EngineRequest, pick: Pick, may_send: Callable[[], bool]
    ) -> Coroutine[None, None, tuple[Pick, Answer]] | None:
        """As of HedgesRequests. Streams alone: the first token of any other answer cannot be seen."""
        inference = request.exchange.inference
        speeds = self.cluster.speeds
        if inference is None or not inference.stream or inference.continues is not None:
            return None
        if speeds is None or request.body.whole is None or pick.decision.reason == PANIC:
            return None
        return Race(self, request, pick, may_send, speeds).run()


class Race:
    """One request. The place that is not returned is settled here."""

    def __init__(
        self, hedger: Hedger, request: EngineRequest, pick: Pick, may_send: Callable[[], bool], speeds: SpeedModel
    ) -> None:
        self._hedger = hedger
        self._request = request
        self._pick = pick
        self._may_send = may_send
        self._speeds = speeds
        self._first: asyncio.Task[Answer] = asyncio.ensure_future(request.ask_engine(pick))
        self._second: asyncio.Task[Answer] | None = None
        self._second_pick: Pick | None = None
        self._note: HedgeNote | None = None

    async def run(self) -> tuple[Pick, Answer]:
        """Return the first answer. Raises the error of the first endpoint if neither answers."""
        result = LEFT
        answered: asyncio.Task[Answer] | None = None
        try:
            decision = await self._wait_until_late()
            if decision is not None:
                self._send_elsewhere(decision)
            answered = await self._await_answer()
            if answered is not self._first:
                result = WON
                return self._of_second(), answered.result()
            result = LOST if _is_good(answered, below=500) else FAILED
            return self._pick, answered.result()
        finally:
            if self._note is not None:
                self._note.result = result
                self._hedger.metrics.results.labels(self._hedger.cluster.name, result).inc()
            await self._end(answered)

    async def _wait_until_late(self) -> Decision[Endpoint] | None:
        """Return where to send the request as well; None: it was answered before, or must not be sent twice."""
        clock = self._hedger.clock
        speeds = self._speeds
        began = clock()
        expected_s = wait_s(self._pick.endpoint, speeds, began)  # this prompt included
        least_s = max(expected_s, LEAST_LATE_S)
        pause_s = expected_s + least_s
        while True:
            done, _ = await asyncio.wait([self._first], timeout=pause_s)
            if done:
                return None
            now = clock()
            decision = self._decide_elsewhere(now)
            if decision is None:
                pause_s = 1.0
                continue
            other = decision.endpoint
            cost_s = wait_s(other, speeds, now) + speeds.slowness(other.id, now) * own_s(
                decision.request.facts, other.id, speeds
            )
            early_s = expected_s + max(least_s, cost_s) - (now - began)
            if early_s > 0 or speeds.estimates(now).samples < LEARNED:
                pause_s = max(TICK_S, early_s)
                continue
            if not self._may_send():
                self._hedger.metrics.results.labels(self._hedger.cluster.name, REFUSED).inc()
                return None
            self._note = HedgeNote(other.id, now - began, expected_s)
            self._request.exchange.outcome.notes[NOTE] = self._note
            return decision

    def _decide_elsewhere(self, now: float) -> Decision[Endpoint] | None:
        """Return where the policy would send the request without its engine; None: nowhere else."""
        asked = self._pick.decision.request
        here = {self._pick.endpoint.id, *self._pick.endpoint.engine.members}
        asked = msgspec.structs.replace(asked, excluded=asked.excluded | here, preferred=None)
        decision = self._hedger.cluster.decide(asked, now)
        if isinstance(decision, Refusal) or decision.reason == PANIC or decision.request.waits_for_room:
            return None
        return decision

    def _send_elsewhere(self, decision: Decision[Endpoint]) -> None:
        self._second_pick = self._hedger.cluster.reserve(decision, self._hedger.clock())
        self._second = asyncio.ensure_future(self._request.ask_whole(self._second_pick))

    async def _await_answer(self) -> asyncio.Task[Answer]:
        """Return the request that was answered first, or the first one where none is answered well."""
        while self._second is not None:
            if not self._first.done() or not self._second.done():
                pending = [one for one in (self._first, self._second) if not one.done()]
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if _is_good(self._first, below=500):
                return self._first
            if _is_good(self._second, below=400):
                return self._second
            if self._second.done():
                break
        await asyncio.wait([self._first])
        return self._first

    def _of_second(self) -> Pick:
        assert self._second_pick is not None
        return self._second_pick

    async def _end(self, answered: asyncio.Task[Answer] | None) -> None:
        """Cancel what goes on, and settle the place that does not answer; without an answer the first place is the
        forwarder's."""
        now = self._hedger.clock()
        losers = [one for one in (self._first, self._second) if one is not None and one is not answered]
        for task in losers:
            pick = self._pick if task is self._first else self._of_second()
            outcome = _judge(task)
            if task is not self._first or answered is not None:
                pick.settle(outcome, now)
                if outcome is AttemptOutcome.FAILURE:
                    self._request.exchange.barred |= {pick.endpoint.id}  # for retries
        await cancel_tasks(losers)


def _is_good(task: asyncio.Task[Answer], *, below: int) -> bool:
    """Return whether the request was answered with a status below that."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return False
    return task.result()[1] < below


def _judge(task: asyncio.Task[Answer]) -> AttemptOutcome:
    """Return what the request that does not answer the client means for its endpoint; its answer is dropped."""
    if not task.done() or task.cancelled():
        return AttemptOutcome.CANCELLED
    error = task.exception()
    if error is not None:
        return AttemptOutcome.BUSY if isinstance(error, PoolFull) else AttemptOutcome.FAILURE
    response, status, _ = task.result()
    response.abort()
    if status < 400:
        return AttemptOutcome.CANCELLED
    if status < 500:
        return AttemptOutcome.CLIENT_ERROR
    return AttemptOutcome.BUSY if status == 503 else AttemptOutcome.FAILURE
