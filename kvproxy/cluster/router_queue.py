"""The router queue in real time: requests wait here, not on an engine, and are placed the moment their turn comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.base.errors import QueueFull
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.endpoint_wait import EndpointWait
from kvproxy.cluster.metrics import RoutingMetrics
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.admission import Admission, RoomWait
from kvproxy.cluster.routing.costs import least_own_s, own_s, wait_s
from kvproxy.cluster.routing.fair_queue import ADMIT_BELOW_S, FairQueue, LeastWait, QueueSettings
from kvproxy.cluster.routing.policy import Candidate, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.waiting_lines import Ticket
from kvproxy.cluster.screening import Refusal
from kvproxy.cluster.settings import RouterQueueSettings

log = logging.getLogger(__name__)

#: Interval of looks at the endpoints: waits shrink continuously, and a shorter one gains nothing.
_TICK_S = 0.005
#: Requests decided in one turn of the event loop, a millisecond each over 200 endpoints.
_DECIDED_A_TURN = 8

Verdict = Decision[Endpoint] | Refusal
#: Decides where a request would go now, and places it in the same turn of the loop (None: refused).
Decide = Callable[[float], Verdict]
Take = Callable[[Verdict, float], Pick | None]


class ReleaseReason(StrEnum):
    """Why a request waits no longer, or could not begin to; a metric label."""

    TURN = "turn"  # an endpoint had capacity
    MAX_WAIT = "max_wait"  # the bound on waiting, whatever was pending at the endpoints
    ROOM = "room"  # an engine's memory had room for its session
    NO_ENDPOINT = "no_endpoint"  # no endpoint was left, or came in time
    ARRIVED = "arrived"  # there was no endpoint, and then one came
    QUEUE_OFF = "queue_off"  # a reload removed the queue
    CLIENT_LEFT = "client_left"
    REFUSED = "refused"  # the queue was full, or a session could not have begun in time


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    """A request that waits: how to place it once its turn has come, and its answer then."""

    decide: Decide
    take: Take
    placed: asyncio.Future[Pick | None]
    came_at: float
    tenant: str
    weight: float
    level: int
    early_s: float  # by which its own deadline is before `max_wait`
    ticket: Ticket[_QueuedRequest] | None = None
    room: RoomWait | None = None  # as the rule counts its wait; None: there is no rule


class QueueSeries:
    """The metric series of one router queue."""

    def __init__(self, cluster: str, metrics: Metrics) -> None:
        self._cluster = cluster
        self._name = f"router/{cluster}"
        self._bounds = metrics.group(BoundMetrics)
        self._routing = metrics.group(RoutingMetrics)
        self.shown = False

    def exits(self, reason: ReleaseReason) -> CounterCell:
        """Return the counter of this reason."""
        return self._routing.router_queue_exits.labels(self._cluster, reason.value)

    def observe_wait(self, wait_s: float) -> None:
        self._routing.router_queue_wait.labels(self._cluster).observe(wait_s)

    def bind_gauges(self, limit: int, depth: Callable[[], int], oldest_s: Callable[[], float]) -> None:
        self.shown = True
        self._bounds.queue_limit.labels(self._name).set(limit)
        self._bounds.queue_depth.labels(self._name).set_function(depth)
        self._routing.router_queue_oldest.labels(self._cluster).set_function(oldest_s)
        for reason in ReleaseReason:
            self.exits(reason)  # starts at 0, so that the first of a kind is an increase

    def remove(self) -> None:
        """Remove the queue from the gauges, if it was shown."""
        if self.shown:
            self._bounds.queue_limit.remove(self._name)
            self._bounds.queue_depth.remove(self._name)
            self._routing.router_queue_oldest.remove(self._cluster)


class EndpointQueue:
    """Requests that wait for a first endpoint."""

    def __init__(self, settings: RouterQueueSettings, speeds: SpeedModel, *, series: QueueSeries, clock: Clock) -> None:
        self.speeds = speeds
        self.waiting: EndpointWait[Verdict] = EndpointWait(settings.limit, settings.max_wait, clock=clock)
        self._series = series
        self._clock = clock
        self._closed = False

    def close(self) -> None:
        """Release all of them, and keep none from now on."""
        self._closed = True
        self.waiting.let_in()

    async def wait(self, decide: Decide, facts: OverlapFacts) -> Verdict:
        """Wait for an endpoint and return the decision, or the last refusal at the deadline. Raises QueueFull."""
        now = self._clock()
        reason = ReleaseReason.CLIENT_LEFT
        try:
            verdict = await self.waiting.wait(
                lambda at: None if (found := decide(at)) is Refusal.NO_ENDPOINTS and not self._closed else found,
                own_s(facts, EndpointId(""), self.speeds),
            )
            if self._closed:
                reason = ReleaseReason.QUEUE_OFF
            else:
                reason = ReleaseReason.NO_ENDPOINT if verdict is None else ReleaseReason.ARRIVED
        except QueueFull:
            reason = ReleaseReason.REFUSED
            raise
        finally:
            self._series.exits(reason).inc()
        self._series.observe_wait(self._clock() - now)
        return Refusal.NO_ENDPOINTS if verdict is None else verdict


class RouterQueue:
    """In front of a cluster that learns `speeds`. `candidates(model, now)` are the endpoints that may be chosen. With
    `awaits` requests wait for a first one, too.

    A task of its own, which lives while requests wait, places them one by one, so that each look sees the load of the
    placement before it, and no request runs another one's decision.
    """

    def __init__(
        self,
        settings: RouterQueueSettings,
        speeds: SpeedModel,
        *,
        cluster: str,
        candidates: Callable[[str, float], Sequence[Candidate]],
        awaits: bool,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        #: Whether endpoints may still appear if there is none.
        self.awaits = awaits
        #: Rule by which requests wait for room in the engines' memory; None: there is none.
        self.admission: Admission | None = None
        self._refuses = settings.enabled is True
        self._series = QueueSeries(cluster, metrics)
        #: Requests that wait for a first endpoint.
        self.without_endpoint = EndpointQueue(settings, speeds, series=self._series, clock=clock)
        self._queue: FairQueue[_QueuedRequest] = FairQueue(_bounds(settings))
        self._speeds = speeds
        self._candidates = candidates
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._load_decreased = asyncio.Event()
        #: Has it look again: an endpoint has less to do than before.
        self.on_load_decrease = self._load_decreased.set
        self._closed = False
        self._cluster = cluster

    def __len__(self) -> int:
        """Return requests waiting."""
        return len(self._queue) + len(self.without_endpoint.waiting)

    @property
    def pending_s(self) -> float:
        """Pooled prefill seconds of all waiting requests, as estimated at their arrival."""
        return self._queue.pending_s + self.without_endpoint.waiting.pending_s

    def status(self, now: float) -> dict[str, object]:
        """For people: what waits against what may, and what became of all requests since the start."""
        settings = self._queue.settings
        exits = {reason.value: int(self._series.exits(reason).value) for reason in ReleaseReason}
        refused = exits.pop(ReleaseReason.REFUSED.value)
        return {
            "depth": len(self),
            "limit": settings.limit,
            "waiting_for_room": self._queue.waiting_for_room,
            "without_endpoint": len(self.without_endpoint.waiting),
            "oldest_wait_s": round(
                max(self._queue.oldest_wait_s(now), self.without_endpoint.waiting.oldest_wait_s(now)), 3
            ),
            "max_wait_s": settings.max_wait_s,
            "released": exits,
            "refused": refused,
        }

    def admits(self, decision: Decision[Endpoint], now: float) -> bool:
        """Return True if the request need not wait: one of its endpoints has room and capacity, and no request waits
        for capacity."""
        queue = self._queue
        speeds = self._speeds
        if decision.request.waits_for_room or queue.waiting > queue.waiting_for_room:
            return False
        if wait_s(decision.endpoint, speeds, now) < ADMIT_BELOW_S:
            return True
        return any(wait_s(one, speeds, now) < ADMIT_BELOW_S for one in decision.candidates)

    async def wait(
        self,
        decision: Decision[Endpoint],
        decide: Decide,
        take: Take,
        *,
        tenant: str,
        level: int,
        weight: float = 1.0,
        within_s: float = math.inf,
    ) -> Pick | None:
        """Wait for the request's turn, `within_s` or `max_wait`, and place it by `take`. With the queue full raises
        QueueFull, or, in a queue that is on by itself, takes the decision at once unless a session would begin without
        room. Raises QueueFull for a session that could not begin in time."""
        now = self._clock()
        early_s = max(0.0, self._queue.settings.max_wait_s - within_s)
        loop = asyncio.get_running_loop()
        queued = _QueuedRequest(decide, take, loop.create_future(), now, tenant, weight, level, early_s)
        try:
            if not self._offer(queued, decision, now):
                return take(decision, now)
        except QueueFull:
            self._series.exits(ReleaseReason.REFUSED).inc()
            raise
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._release_in_turn(), name=f"router queue {self._cluster}")
        # an endpoint may have capacity, since requests for another model kept this one waiting
        self._load_decreased.set()
        try:
            pick = await queued.placed
        except asyncio.CancelledError:
            self._abandon(queued)
            raise
        finally:
            del queued.placed  # an error in it has frames that hold the request
            if queued.room is not None:
                queued.room.over(self._clock())
        self._series.observe_wait(self._clock() - now)
        return pick

    def _offer(self, queued: _QueuedRequest, decision: Decision[Endpoint], now: float) -> bool:
        """Queue a request, for room if it needs some; False: the queue is full, and it does not wait. Raises
        QueueFull."""
        request = decision.request
        by = self.admission
        if queued.room is not None:
            queued.room.over(now)
        room = queued.room = _begin_wait(by, request, self._queue.settings.max_wait_s - queued.early_s, now)

        def has_room(now: float) -> bool:
            """Return whether an endpoint has room, by the rule that counted the wait; without that rule it is over."""
            if room is None or self._closed or by is not self.admission:
                return True
            return room.has_room(self._candidates(request.model, now), now)

        queued.ticket = self._queue.offer(
            queued,
            least_own_s(request.facts, decision.candidates, self._speeds),
            queued.came_at,
            model=request.model,
            level=queued.level,
            tenant=queued.tenant,
            weight=queued.weight,
            early_s=queued.early_s,
            has_room=has_room if room is not None and request.waits_for_room else None,
        )
        if queued.ticket is not None:
            return True
        if room is not None:
            room.over(now)
        later_s = self._queue.retry_after_s(now) if self._refuses else _begins_later_s(by, request, now)
        if later_s is None:
            return False
        raise QueueFull(later_s)

    def on_endpoints_change(self) -> None:
        """There may be an endpoint now."""
        if len(self.without_endpoint.waiting) and self._candidates("", self._clock()):
            self.without_endpoint.waiting.let_in()

    def reconfigure(self, settings: RouterQueueSettings, speeds: SpeedModel, *, awaits: bool) -> None:
        """Other bounds, and maybe other speeds. Requests go on waiting, by the new ones."""
        # Kept over a reload with its task: requests of both generations wait in one line.
        self.awaits = awaits
        self._refuses = settings.enabled is True
        self.without_endpoint.waiting.limit = settings.limit
        self.without_endpoint.waiting.max_wait_s = settings.max_wait
        self._queue.reconfigure(_bounds(settings))
        self._speeds = speeds
        self.without_endpoint.speeds = speeds
        if self._series.shown:
            self.bind_gauges()
        self._load_decreased.set()

    def bind_gauges(self) -> None:
        queue = self._queue
        others = self.without_endpoint.waiting
        clock = self._clock
        self._series.bind_gauges(
            queue.settings.limit,
            lambda: len(queue) + len(others),
            lambda: max(queue.oldest_wait_s(now := clock()), others.oldest_wait_s(now)),
        )

    def close(self) -> None:
        """Release all requests, and remove the queue from the gauges."""
        self._closed = True
        self.without_endpoint.close()
        self._load_decreased.set()
        self._series.remove()

    async def _release_in_turn(self) -> None:
        """Places what may go, whenever load fell or time alone may have changed the answer, until nothing waits."""
        self._load_decreased = asyncio.Event()  # one belongs to the event loop in which it was waited for
        self.on_load_decrease = self._load_decreased.set
        while len(self._queue):
            self._load_decreased.clear()
            try:
                delay_s = self._release(self._clock())
            except Exception:
                log.exception("the router queue of %s cannot look at its endpoints", self._cluster)
                delay_s = 1.0
            if delay_s == 0.0:
                await asyncio.sleep(0)
            elif delay_s is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._load_decreased.wait()

    def _release(self, now: float) -> float | None:
        """Seconds until to look again, 0 when other tasks are to have their turn first; None when nothing waits."""
        for _ in range(_DECIDED_A_TURN):
            candidates = _no_candidates if self._closed else self._candidates
            ticket = self._queue.poll(_least_wait(candidates, self._speeds, now), now)
            if ticket is None:
                room_at = math.inf if self.admission is None else self.admission.next_change_at(now)
                at = self._queue.next_poll_at(_least_wait(candidates, self._speeds, now), now, room_at=room_at)
                return None if at is None else max(_TICK_S, at - now)
            why = _reason(ticket, now, self._queue.settings.max_wait_s)
            self._place(ticket.let_go(), ReleaseReason.QUEUE_OFF if self._closed else why, now)
        return 0.0

    def _place(self, queued: _QueuedRequest, why: ReleaseReason, now: float) -> None:
        if queued.placed.done():
            if queued.placed.cancelled():  # its own task has not noticed yet
                self._series.exits(ReleaseReason.CLIENT_LEFT).inc()
            return
        try:
            verdict = queued.decide(now)
            if not isinstance(verdict, Refusal):
                if why is ReleaseReason.TURN and verdict.request.waits_for_room and self._offer(queued, verdict, now):
                    return
                later_s = _begins_later_s(self.admission, verdict.request, now)
                if why is ReleaseReason.MAX_WAIT and later_s is not None:
                    raise QueueFull(later_s)
            if queued.room is not None:
                queued.room.over(now)
            pick = queued.take(verdict, now)
        except Exception as error:  # noqa: BLE001 - belongs to this request, not to the others that wait
            if isinstance(error, QueueFull):
                self._series.exits(ReleaseReason.REFUSED).inc()
            queued.placed.set_exception(error)
            return
        self._series.exits(ReleaseReason.NO_ENDPOINT if pick is None else why).inc()
        queued.placed.set_result(pick)

    def _abandon(self, queued: _QueuedRequest) -> None:
        """Remove the request of a client that left, possibly in the same moment as its turn."""
        ticket = queued.ticket
        if ticket is not None and not ticket.released:
            self._series.exits(ReleaseReason.CLIENT_LEFT).inc()
            self._queue.cancel(ticket)
            self._load_decreased.set()  # the next request may be another one, and the task ends with the last
        if queued.placed.done() and not queued.placed.cancelled() and queued.placed.exception() is None:
            pick = queued.placed.result()
            if pick is not None:
                pick.settle(AttemptOutcome.CANCELLED, self._clock())


def _bounds(settings: RouterQueueSettings) -> QueueSettings:
    return QueueSettings(settings.limit, settings.max_wait)


def _begin_wait(by: Admission | None, request: PickRequest, max_wait_s: float, now: float) -> RoomWait | None:
    """Return the request's wait by the rule; None: there is none. Raises QueueFull if room would come too late."""
    if by is None:
        return None
    if request.waits_for_room and (later_s := by.retry_after_s(request, max_wait_s, now)) is not None:
        raise QueueFull(later_s)
    return by.wait(request, now)


def _begins_later_s(by: Admission | None, request: PickRequest, now: float) -> float | None:
    """Return when a session that would begin where it has no room should come again; None: this is no such one."""
    return by.retry_after_s(request, 0.0, now) if by is not None and request.waits_for_room else None


def _reason(ticket: Ticket[_QueuedRequest], now: float, max_wait_s: float) -> ReleaseReason:
    if now - ticket.queued_at >= max_wait_s:
        return ReleaseReason.MAX_WAIT
    return ReleaseReason.TURN if ticket.has_room is None else ReleaseReason.ROOM


def _no_candidates(model: str, now: float) -> Sequence[Candidate]:
    return ()


def _least_wait(candidates: Callable[[str, float], Sequence[Candidate]], speeds: SpeedModel, now: float) -> LeastWait:
    """Of the endpoints that may be chosen for a model; those of many models are often the same."""
    known: dict[int, float] = {}

    def least_wait_s(model: str) -> float:
        found = candidates(model, now)
        least_s = known.get(id(found))
        if least_s is None:
            least_s = known[id(found)] = min((wait_s(one, speeds, now) for one in found), default=0.0)
        return least_s

    return least_wait_s
