"""The router queue in real time: requests wait here, not on an engine, and are placed the moment their turn comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.config.cluster_schema import RouterQueueSettings
from kvproxy.metrics.catalog import Metrics
from kvproxy.routing.fair_queue import FairQueue, QueueSettings, Ticket
from kvproxy.routing.forecast import Forecaster, least_own_s, least_wait_s
from kvproxy.routing.policy import Candidate, PickRequest
from kvproxy.routing.speeds import SpeedModel
from kvproxy.types import Clock

#: Waits shrink continuously; asking more often than this gains nothing.
_TICK_S = 0.005


class ReleaseReason(StrEnum):
    """Why somebody waits no longer, or could not begin to; a metric label."""

    TURN = "turn"  # an endpoint had room
    MAX_WAIT = "max_wait"  # the bound on waiting, whatever the endpoints had pending
    NO_ENDPOINT = "no_endpoint"  # nobody was left to take it
    QUEUE_OFF = "queue_off"  # a reload took the queue away
    CLIENT_LEFT = "client_left"
    REFUSED = "refused"  # the queue was full


class QueueFull(Exception):
    """No place is left to wait; come back in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the router queue is full")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedRequest:
    """Who waits: how to place it once its turn has come, and who is told."""

    again: Callable[[], PickRequest]
    placed: asyncio.Future[Pick | None]


class RouterQueue:
    """In front of one cluster whose policy forecasts prefills.

    `candidates(model, now)` are the endpoints that may be chosen now, `pick(request, now)` chooses and reserves one.
    Placing happens here, inside the turn of the loop that released the request, so that the next look sees its load.
    """

    def __init__(
        self,
        settings: RouterQueueSettings,
        forecaster: Forecaster,
        *,
        cluster: str,
        candidates: Callable[[str, float], Sequence[Candidate]],
        pick: Callable[[PickRequest, float], Pick | None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._queue: FairQueue[_QueuedRequest] = FairQueue(_bounds(settings))
        self._forecaster = forecaster
        self._candidates = candidates
        self._pick = pick
        self._metrics = metrics
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        self._cluster = cluster
        self._name = f"router/{cluster}"
        metrics.bounds.queue_limit.labels(self._name).set(settings.limit)
        metrics.bounds.queue_depth.labels(self._name).set_function(lambda: len(self._queue))
        metrics.request.router_queue_oldest.labels(cluster).set_function(lambda: self._queue.oldest_wait_s(clock()))
        self._waited = metrics.request.router_queue_wait.labels(cluster)
        self._exits = {
            exit_: metrics.request.router_queue_exits.labels(cluster, exit_.value) for exit_ in ReleaseReason
        }

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    def status(self, now: float) -> dict[str, object]:
        """For people: who waits against what may, and what became of everybody since the start."""
        settings = self._queue.settings
        exits = {exit_.value: int(tally.value) for exit_, tally in self._exits.items()}
        refused = exits.pop(ReleaseReason.REFUSED.value)
        return {
            "depth": len(self._queue),
            "limit": settings.limit,
            "oldest_wait_s": round(self._queue.oldest_wait_s(now), 3),
            "max_wait_s": settings.max_wait_s,
            "released": exits,
            "refused": refused,
        }

    async def pick(
        self, asked: PickRequest, *, again: Callable[[], PickRequest], tenant: str, priority: int
    ) -> Pick | None:
        """A place for this request, at once or when its turn has come; None when nobody may take it.

        Whoever waited is asked for `again` then, since facts age. Raises QueueFull.
        """
        now = self._clock()
        candidates = self._candidates(asked.model, now)
        if not candidates or self._queue.admits(least_wait_s(candidates, self._speeds, now)):
            return self._pick(asked, now)
        guest = _QueuedRequest(again, asyncio.get_running_loop().create_future())
        own_s = least_own_s(asked.facts, candidates, self._speeds)
        ticket = self._queue.offer(guest, own_s, now, priority=priority, tenant=tenant)
        if ticket is None:
            self._exits[ReleaseReason.REFUSED].inc()
            raise QueueFull(self._queue.retry_after_s(now))
        self._set_timer(now)
        try:
            pick = await guest.placed
        except asyncio.CancelledError:
            self._leave(ticket)
            raise
        self._waited.observe(self._clock() - now)
        return pick

    def load_fell(self, now: float) -> None:
        """An endpoint has less to do than before: place whoever's turn has come."""
        if len(self._queue) and not self._looking:
            self._look(now)

    def reconfigure(self, settings: RouterQueueSettings, forecaster: Forecaster) -> None:
        """Other bounds, and maybe another forecaster. Whoever waits goes on waiting, by the new ones."""
        self._queue.reconfigure(_bounds(settings))
        self._forecaster = forecaster
        self._metrics.bounds.queue_limit.labels(self._name).set(settings.limit)
        if len(self._queue):
            self._look(self._clock())

    def close(self) -> None:
        """Place everybody now, and show no queue any more."""
        now = self._clock()
        self._looking = True
        while (ticket := self._queue.poll(-math.inf, now)) is not None:
            self._place(ticket, ReleaseReason.QUEUE_OFF, now)
        self._set_timer(now)
        self._metrics.bounds.queue_limit.remove(self._name)
        self._metrics.bounds.queue_depth.remove(self._name)
        self._metrics.request.router_queue_oldest.remove(self._cluster)

    @property
    def _speeds(self) -> SpeedModel:
        return self._forecaster.speeds

    def _look(self, now: float) -> None:
        self._looking = True  # a pick that fails settles, and settling comes back here
        max_wait_s = self._queue.settings.max_wait_s
        try:
            while (ticket := self._queue.poll(self._least_wait_s(now), now)) is not None:
                overdue = now - ticket.queued_at >= max_wait_s
                self._place(ticket, ReleaseReason.MAX_WAIT if overdue else ReleaseReason.TURN, now)
        finally:
            self._looking = False
        self._set_timer(now)

    def _place(self, ticket: Ticket[_QueuedRequest], why: ReleaseReason, now: float) -> None:
        guest = ticket.item
        if guest.placed.done():  # cancelled, and its own task has not noticed yet
            self._exits[ReleaseReason.CLIENT_LEFT].inc()
            return
        pick = self._pick(guest.again(), now)
        self._exits[ReleaseReason.NO_ENDPOINT if pick is None else why].inc()
        guest.placed.set_result(pick)

    def _least_wait_s(self, now: float) -> float:
        """Of the whole cluster: a request for a model that few serve waits with all others."""
        candidates = self._candidates("", now)
        return least_wait_s(candidates, self._speeds, now) if candidates else 0.0

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._queue.next_poll_at(self._least_wait_s(now), now) if len(self._queue) else None
        if at is not None:
            delay_s = max(_TICK_S, at - now)
            self._timer = asyncio.get_running_loop().call_later(delay_s, lambda: self.load_fell(self._clock()))

    def _leave(self, ticket: Ticket[_QueuedRequest]) -> None:
        """The client is gone; maybe its turn had come in the same moment."""
        guest = ticket.item
        if not ticket.released:
            self._exits[ReleaseReason.CLIENT_LEFT].inc()
            self._queue.cancel(ticket)
        if guest.placed.done() and not guest.placed.cancelled():
            pick = guest.placed.result()
            if pick is not None:
                pick.settle(AttemptOutcome.CANCELLED, self._clock())


def _bounds(settings: RouterQueueSettings) -> QueueSettings:
    return QueueSettings(settings.limit, settings.admit_below, settings.ageing, settings.max_wait)
