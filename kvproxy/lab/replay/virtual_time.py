"""A trace through a router and simulated engines, in virtual time.

The router sees only what a proxy sees: requests, first tokens, ends, the cached tokens each response reports, and (late
if asked) the engines' KV events.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvproxy.lab.replay.replicas import ManyRouters
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import EngineBlocks, Pace
from kvproxy.lab.replay.trace import Trace
from kvproxy.lab.replay.transfers import SimTransfers
from kvproxy.lab.replay.view import CacheView
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import (
    CacheChanged,
    EngineOutput,
    Finished,
    FirstToken,
    KvEvent,
    Preempted,
    Rejected,
    SimRequest,
)

#: A timer of the router queue is never set closer than this: waits shrink continuously, and asking costs.
_QUEUE_TICK_S = 0.002

#: How often engines' metrics are read: as `engine_metrics_interval` has it.
_SCRAPE_S = 5.0


#: Handler of an event: gets its object and the time.
_Handler = Callable[[Any, float], None]


@dataclass(frozen=True, slots=True)
class Change:
    """An endpoint's engine is lost (None), or another comes in its place."""

    at: float
    endpoint: SimEndpoint
    engine: Engine | None


class Timeline:
    """Events in order of their times; handlers may add more."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int, _Handler, Any]] = []
        self._count = 0

    def push(self, at: float, handler: _Handler, what: Any) -> None:
        """Call the handler with its object at that time; of equal times the first pushed comes first."""
        self._count += 1
        heapq.heappush(self.events, (at, self._count, handler, what))

    def run(self) -> None:
        """Handle all of them."""
        events = self.events
        while events:
            now, _, handler, what = heapq.heappop(events)
            handler(what, now)


class Arrivals:
    """When the turns of a trace come: `arrive` gets (session, turn). Where sessions are bounded, one begins as
    another ends. `progress` is called with the number of ended requests."""

    def __init__(
        self, trace: Trace, pace: Pace, timeline: Timeline, arrive: _Handler, *, progress: Callable[[int], None]
    ) -> None:
        self._trace = trace
        self._pace = pace
        self._timeline = timeline
        self._arrive = arrive
        self._progress = progress
        self._ended = 0
        self._bounded = pace.closed_loop and pace.sessions_at_once > 0
        self._sessions = 0  # under way, where they are bounded
        self._not_begun: deque[int] = deque()

    def begin(self, jitter: Random | None) -> None:
        """Schedule what does not follow from an end."""
        first = self._begin if self._bounded else self._arrive
        for at, session, number in self._pace.arrivals(self._trace, jitter=jitter):
            self._timeline.push(at, first, (session, number))

    def end(self, request: LiveRequest, now: float) -> None:
        """End a request; the session goes on in any case."""
        self._ended += 1
        self._progress(self._ended)
        turns = self._trace.sessions[request.session].turns
        if self._pace.closed_loop and request.number + 1 < len(turns):
            following = request.number + 1
            self._timeline.push(now + turns[following].delay_s, self._arrive, (request.session, following))
        elif self._bounded:
            self._sessions -= 1
            if self._not_begun:
                self._timeline.push(now, self._begin, (self._not_begun.popleft(), 0))

    def _begin(self, turn_of_session: tuple[int, int], now: float) -> None:
        """Begin a session, or keep it until another ends."""
        if self._sessions < self._pace.sessions_at_once:
            self._sessions += 1
            self._arrive(turn_of_session, now)
        else:
            self._not_begun.append(turn_of_session[0])


class EngineClock:
    """Advances each engine when it has something to do. `sharing`: engines that share one cache, of which each may have
    to wait until another frees blocks."""

    def __init__(
        self,
        timeline: Timeline,
        follow: Callable[[SimEndpoint, Sequence[EngineOutput], float], None],
        release: Callable[[float], None],
        *,
        sharing: Sequence[SimEndpoint],
    ) -> None:
        self._timeline = timeline
        self._follow = follow
        self._release = release
        self._sharing = sharing

    def wake(self, endpoint: SimEndpoint) -> None:
        """Note that an engine was given something."""
        due = endpoint.engine.next_event_at()
        if due is not None and due != endpoint.due:
            endpoint.due = due
            self._timeline.push(due, self._advance, endpoint)

    def _advance(self, endpoint: SimEndpoint, now: float) -> None:
        if endpoint.due != now:
            return  # an arrival since moved the engine's next event
        endpoint.due = None
        self._follow(endpoint, endpoint.engine.advance(now), now)
        self.wake(endpoint)
        for each in self._sharing:
            if each.engine.wake(now):
                self.wake(each)
        self._release(now)


class VirtualTime:
    """One run. `sharing`: engines of one cache. When an engine is lost, what has no first token is routed again,
    as the proxy does; the other answers are broken."""

    def __init__(
        self,
        blocks: EngineBlocks,
        pace: Pace,
        router: VirtualRouter | ManyRouters,
        view: CacheView | ManyRouters,
        *,
        index_delay_s: float = 0.0,
        sharing: Sequence[SimEndpoint] = (),
        transfers: SimTransfers | None = None,
        changes: Sequence[Change] = (),
        streams: Callable[[], bool] = lambda: True,
        jitter: Random | None = None,
        progress: Callable[[int], None] = lambda finished: None,
    ) -> None:
        self._blocks = blocks
        self._router = router
        self._view = view
        self._index_delay_s = index_delay_s
        self._transfers = transfers
        self._changes = changes
        self._streams = streams
        self._jitter = jitter
        self._timeline = Timeline()
        self._arrivals = Arrivals(blocks.trace, pace, self._timeline, self._arrive, progress=progress)
        self._engines = EngineClock(self._timeline, self._follow, self._release, sharing=sharing)
        self._placed: dict[str, Placement] = {}
        self._outcomes: list[ReplayOutcome] = []
        self._queue_due = 0.0

    def run(self) -> Sequence[ReplayOutcome]:
        """Plays the whole trace; outcomes in order of arrival."""
        self._arrivals.begin(self._jitter)
        for change in self._changes:
            self._timeline.push(change.at, self._change, change)
        self._timeline.push(_SCRAPE_S, self._scrape, None)
        self._timeline.run()
        return self._outcomes

    def _arrive(self, turn_of_session: tuple[int, int], now: float) -> None:
        session, number = turn_of_session
        turn = self._blocks.turn(session, number)
        outcome = ReplayOutcome(
            now,
            turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            session=session,
            tenant=self._blocks.trace.sessions[session].tenant,
        )
        request = LiveRequest(session, number, turn, outcome)
        request.name = str(len(self._outcomes))
        request.streams = self._streams()
        self._outcomes.append(request.outcome)
        self._route(request, now)

    def _route(self, request: LiveRequest, now: float) -> None:
        placement = self._router.arrive(request, now)
        if placement is None:
            self._set_queue_timer(now)
        else:
            self._submit(placement, now)

    def _submit(self, placement: Placement, now: float) -> None:
        self._placed[placement.request.name] = placement
        transfer = placement.transfer
        if transfer is not None and self._transfers is not None:
            source = next(one for one in self._router.endpoints if one.id == transfer.source)
            engines = source.engine, placement.endpoint.engine
            over_at, blocks = self._transfers.begin(transfer, *engines, placement.request.turn.blocks, now)
            self._timeline.push(over_at, self._copied, (placement, blocks))
        else:
            self._give(placement, now)

    def _copied(self, copied: tuple[Placement, Sequence[int]], now: float) -> None:
        """Deliver a copy; it is wasted if the request is elsewhere by now, or over."""
        placement, blocks = copied
        if self._placed.get(placement.request.name) is not placement:
            return
        assert isinstance(self._router, VirtualRouter)  # several do not copy
        placement.endpoint.engine.receive(blocks, now)
        self._router.copied(placement, len(blocks), now)
        self._give(placement, now)

    def _give(self, placement: Placement, now: float) -> None:
        request = placement.request
        endpoint = placement.endpoint
        turn = request.turn
        blocks = self._blocks.left_by(request.session, request.number)
        work = SimRequest(request.name, blocks, turn.prompt_tokens, turn.output_tokens, priority=placement.priority)
        endpoint.engine.submit(work, now)
        self._engines.wake(endpoint)

    def _follow(self, endpoint: SimEndpoint, outputs: Sequence[EngineOutput], now: float) -> None:
        """Handle what an engine makes. Its KV events reach the router at once, or late."""
        for output in outputs:
            if isinstance(output, CacheChanged):
                if self._index_delay_s:
                    heard = endpoint, endpoint.engine, output.events
                    self._timeline.push(now + self._index_delay_s, self._hear, heard)
                else:
                    self._view.observe(endpoint.index, output.events)
            elif isinstance(output, FirstToken):
                placement = self._placed[output.request_id]
                outcome = placement.request.outcome
                outcome.admitted_at = output.admitted_at
                outcome.first_token_at = now
                outcome.cached_tokens = output.cached_tokens
                placement.prefill_s = now - output.admitted_at
                self._router.first_token(placement, now)
            elif isinstance(output, Preempted):
                self._placed[output.request_id].request.outcome.preemptions += 1
            elif isinstance(output, Finished | Rejected):
                self._finish(self._placed.pop(output.request_id), now)

    def _hear(self, published: tuple[SimEndpoint, Engine, Sequence[KvEvent]], now: float) -> None:
        endpoint, engine, events = published
        if endpoint.engine is engine:
            self._view.observe(endpoint.index, events)

    def _finish(self, placement: Placement, now: float) -> None:
        request = placement.request
        if request.outcome.first_token_at is not None:
            request.outcome.finished_at = now
        self._router.finished(placement, now)
        if request.outcome.first_token_at is not None:
            computed = request.outcome.prompt_tokens - request.outcome.cached_tokens
            placement.endpoint.count(placement.prefill_s, computed)
        self._arrivals.end(request, now)

    def _scrape(self, what: None, now: float) -> None:
        for endpoint in self._router.endpoints:
            endpoint.scrape_engine(now)
        if self._timeline.events:  # something is still to come
            self._timeline.push(now + _SCRAPE_S, self._scrape, None)

    def _change(self, change: Change, now: float) -> None:
        endpoint = change.endpoint
        if change.engine is not None:
            endpoint.engine = change.engine
            self._router.join(endpoint)
        elif endpoint in self._router.endpoints:
            self._lose(endpoint, now)
        self._release(now)

    def _lose(self, endpoint: SimEndpoint, now: float) -> None:
        endpoint.due = None
        lost = [placement for placement in self._placed.values() if placement.endpoint is endpoint]
        self._router.leave(endpoint, lost, now)
        for request in (placement.request for placement in lost):
            del self._placed[request.name]
            if request.outcome.first_token_at is None:
                self._route(request, now)
            else:
                request.outcome.first_token_at = None  # a broken answer is none
                self._arrivals.end(request, now)

    def _release(self, now: float) -> None:
        while (placement := self._router.release(now)) is not None:
            self._submit(placement, now)
        self._set_queue_timer(now)

    def _set_queue_timer(self, now: float) -> None:
        at = self._router.next_release_at(now)
        if at is not None and not now < self._queue_due <= at:
            self._queue_due = max(at, now + _QUEUE_TICK_S)
            self._timeline.push(
                self._queue_due, lambda _, at: self._release(at) if at == self._queue_due else None, None
            )
