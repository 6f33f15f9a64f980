"""The router queue in real time: requests wait here, not on an engine, and are placed the moment their turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvproxy.balancing.forecast import Forecaster, least_own_s, least_wait_s
from kvproxy.balancing.policy import Candidate, PickRequest
from kvproxy.balancing.queue import QueueSettings, RouterQueue
from kvproxy.balancing.speed import SpeedModel
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.config import schema
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock

#: Waits shrink continuously; asking more often than this gains nothing.
_TICK_S = 0.005


class QueueFull(Exception):
    """No place is left to wait; come back in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the router queue is full")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, eq=False)
class _Guest:
    """Who waits: how to place it once its turn has come, and who is told."""

    request: Callable[[], PickRequest]
    placed: asyncio.Future[Pick | None]


class WaitingRoom:
    """In front of one cluster whose policy forecasts prefills.

    `candidates(model, now)` are the endpoints that may be chosen now, `pick(request, now)` chooses and reserves one.
    Placing happens here, inside the turn of the loop that released the request, so that the next look sees its load.
    """

    def __init__(
        self,
        settings: schema.RouterQueue,
        forecaster: Forecaster,
        *,
        cluster: str,
        candidates: Callable[[str, float], Sequence[Candidate]],
        pick: Callable[[PickRequest, float], Pick | None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._queue: RouterQueue[_Guest] = RouterQueue(
            QueueSettings(settings.limit, settings.admit_below, settings.ageing, settings.max_wait)
        )
        self._forecaster = forecaster
        self._candidates = candidates
        self._pick = pick
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        name = f"router/{cluster}"
        metrics.queue_limit.labels(name).set(settings.limit)
        metrics.queue_depth.labels(name).set_function(lambda: len(self._queue))
        self._waited = metrics.router_queue_wait.labels(cluster)

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    async def pick(self, request: Callable[[], PickRequest], *, tenant: str, priority: int) -> Pick | None:
        """A place for this request, at once or when its turn has come; None when nobody may take it.

        `request` is asked again at that time, since facts age. Raises QueueFull.
        """
        now = self._clock()
        asked = request()
        candidates = self._candidates(asked.model, now)
        if not candidates or self._queue.admits(least_wait_s(candidates, self._speeds, now)):
            return self._pick(asked, now)
        guest = _Guest(request, asyncio.get_running_loop().create_future())
        own_s = least_own_s(asked.facts, candidates, self._speeds)
        ticket = self._queue.offer(guest, own_s, now, priority=priority, tenant=tenant)
        if ticket is None:
            raise QueueFull(self._queue.retry_after_s(now))
        self._set_timer(now)
        try:
            pick = await guest.placed
        except asyncio.CancelledError:
            self._queue.cancel(ticket)
            self._give_back(guest)
            raise
        self._waited.observe(self._clock() - now)
        return pick

    def load_fell(self, now: float) -> None:
        """An endpoint has less to do than before: place whoever's turn has come."""
        if len(self._queue) and not self._looking:
            self._look(now)

    @property
    def _speeds(self) -> SpeedModel:
        return self._forecaster.speeds

    def _look(self, now: float) -> None:
        self._looking = True  # a pick that fails settles, and settling comes back here
        try:
            while (ticket := self._queue.poll(self._least_wait_s(now), now)) is not None:
                guest = ticket.item
                if not guest.placed.done():
                    guest.placed.set_result(self._pick(guest.request(), now))
        finally:
            self._looking = False
        self._set_timer(now)

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

    def _give_back(self, guest: _Guest) -> None:
        """Its turn had come in the same moment in which its client left."""
        if guest.placed.done() and not guest.placed.cancelled():
            pick = guest.placed.result()
            if pick is not None:
                pick.settle(AttemptOutcome.CANCELLED, self._clock())
