"""The router of a replay: a policy over load ledgers and a view of the caches, with or without the router queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvproxy.base.types import EndpointId
from kvproxy.cluster.pick import reserve, split_prompt
from kvproxy.cluster.routing import selector
from kvproxy.cluster.routing.admission import Admission, RoomWait, Stay
from kvproxy.cluster.routing.costs import least_own_s, wait_s
from kvproxy.cluster.routing.engine_samples import NOTHING_READ, EndedWork, Reading
from kvproxy.cluster.routing.fair_queue import ADMIT_BELOW_S, FairQueue, QueueSettings
from kvproxy.cluster.routing.load import EndpointLoad, EngineState, Reservation, count_live_blocks
from kvproxy.cluster.routing.policy import OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.settings import EndpointRole
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.trace import Turn
from kvproxy.lab.replay.transfers import SimTransfers
from kvproxy.lab.replay.view import CacheView, Settle
from kvproxy.lab.simulator.engine import Engine

if TYPE_CHECKING:
    from kvproxy.features.transfers.copy_planner import Transfer


@dataclass(slots=True, eq=False)
class SimEndpoint:
    """A simulated engine as the router's candidate."""

    id: EndpointId
    index: int
    engine: Engine
    load: EndpointLoad = field(default_factory=EndpointLoad)
    ended: EndedWork = field(init=False)
    weight: float = 1.0
    role: EndpointRole = EndpointRole.BOTH
    due: float | None = None  # when the engine is to be advanced
    prefills: Reading = NOTHING_READ  # of requests that ended, as the engine counts them
    seen_as: Sequence[SimEndpoint] = ()  # by each of several routers

    def __post_init__(self) -> None:
        self.ended = EndedWork(self.load)

    def count(self, prefill_s: float, computed_tokens: int) -> None:
        """Count a request that ended."""
        so_far = self.prefills
        tokens = (so_far.computed_tokens or 0) + computed_tokens
        self.prefills = Reading(so_far.prefills + 1, so_far.seconds + prefill_s, tokens)

    def scrape_engine(self, now: float) -> None:
        """Read the engine's metrics as the proxy does."""
        self.ended.read_counters(self.prefills, now)
        settings = self.engine.settings
        load = self.engine.load
        capacity_tokens = settings.capacity_blocks * settings.block_size
        self.load.engine = EngineState(now, capacity_tokens, load.running, load.waiting)
        for one in self.seen_as:
            one.prefills = self.prefills
            one.scrape_engine(now)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request on its way."""

    session: int
    number: int  # of its turn
    turn: Turn
    outcome: ReplayOutcome
    name: str = ""
    streams: bool = True  # its first token is seen when it comes
    room: RoomWait | None = None  # its wait, as the rule of admission counts it


@dataclass(slots=True, eq=False)
class Placement:
    """Where a request went, and what was expected there."""

    request: LiveRequest
    endpoint: SimEndpoint
    reservation: Reservation
    settle: Settle
    priority: int = 0  # for an engine that schedules by it
    transfer: Transfer | None = None  # of KV that comes with it
    prefill_s: float = 0.0  # as the engine counts it
    stay: Stay | None = None  # in the engine's memory, by the rule of admission


class EngineOrder:
    """The numbers by which engines admit requests, as the proxy forwards them."""

    def __init__(self, policy: Policy) -> None:
        from kvproxy.features.priority.urgency import EPOCH_S, UrgencyScale  # others need none of it

        self._now = 0.0
        self._scale = UrgencyScale(speeds=lambda: policy.speeds, wall_clock=lambda: EPOCH_S + self._now)

    def find_priority(
        self, outcome: ReplayOutcome, facts: OverlapFacts, endpoint: EndpointId, now: float, *, endpoints: int
    ) -> int:
        """Return the number of a request for one of so many endpoints."""
        self._now = now
        urgency_s = self._scale.urgency_s(
            facts, endpoint, received_at=outcome.arrived_at, now=now, tenant=outcome.tenant, endpoints=endpoints
        )
        return self._scale.engine_priority(urgency_s)


class VirtualRouter:
    """Decides and counts as the proxy does, and learns from the same signals."""

    def __init__(
        self,
        endpoints: Sequence[SimEndpoint],
        policy: Policy,
        view: CacheView,
        *,
        queue: QueueSettings | None = None,
        priority: bool = False,
        reports_cached: bool = True,
        transfers: SimTransfers | None = None,
        make_admission: Callable[[], Admission | None] | None = None,
    ) -> None:
        self.endpoints = list(endpoints)  # those present
        self._policy = policy
        self._view = view
        self._queue: FairQueue[LiveRequest] = FairQueue(QueueSettings(limit=0) if queue is None else queue)
        self._speeds = policy.speeds if queue is not None else None
        self._order = EngineOrder(policy) if priority else None
        self._reports_cached = reports_cached
        self._transfers = transfers
        #: Rule by which sessions wait for room; None: there is none.
        self.admission = None if make_admission is None or queue is None else make_admission()
        if self.admission is not None:
            self.admission.speeds = policy.speeds
        for endpoint in endpoints:
            self._connect(endpoint)

    def arrive(self, request: LiveRequest, now: float) -> Placement | None:
        """Places a request, or queues it (None). With the queue full it is placed at once, unlike in the proxy, which
        refuses it: figures of policies that refuse different requests could not be compared."""
        decision = self._decide(request, now)
        waits = self._speeds is not None and (
            decision.request.waits_for_room
            or self._queue.waiting > self._queue.waiting_for_room
            or least_wait_s(self.endpoints, self._speeds, now) >= ADMIT_BELOW_S
        )
        if waits and self._offer(request, decision, now):
            return None
        return self._place(request, decision, now)

    def _offer(self, request: LiveRequest, decision: Decision[SimEndpoint], now: float) -> bool:
        """Queue a request; False: the queue is full."""
        assert self._speeds is not None
        has_room = None
        if self.admission is not None:
            room = request.room = self.admission.wait(decision.request, now)
            if decision.request.waits_for_room:
                has_room = lambda at: room.has_room(self.endpoints, at)  # noqa: E731
        own_s = least_own_s(decision.request.facts, self.endpoints, self._speeds)
        outcome = request.outcome
        return self._queue.offer(request, own_s, outcome.came_at, tenant=outcome.tenant, has_room=has_room) is not None

    def release(self, now: float) -> Placement | None:
        """Places the next queued request whose time has come; call until None."""
        while len(self._queue):
            ticket = self._queue.poll(lambda model: least_wait_s(self.endpoints, self._speeds, now), now)
            if ticket is None:
                return None
            request = ticket.let_go()
            decision = self._decide(request, now)
            room = request.room
            if room is not None:
                room.over(now)
                request.room = None
            if not decision.request.waits_for_room or (
                ticket.has_room is not None and not self._comes_again(request, decision, now)
            ):
                return self._place(request, decision, now)
            if not self._offer(request, decision, now):
                return self._place(request, decision, now)
        return None

    def _comes_again(self, request: LiveRequest, decision: Decision[SimEndpoint], now: float) -> bool:
        """Return whether the proxy refuses a request that has waited for too long, and count that its client tries
        again."""
        if self.admission is None or self.admission.retry_after_s(decision.request, 0.0, now) is None:
            return False
        request.outcome.refusals += 1
        request.outcome.came_again_at = now
        return True

    def next_release_at(self, now: float) -> float | None:
        """When `release` may have something although no load changes."""
        if not len(self._queue):
            return None
        room_at = math.inf if self.admission is None else self.admission.next_change_at(now)
        return self._queue.next_poll_at(
            lambda model: least_wait_s(self.endpoints, self._speeds, now), now, room_at=room_at
        )

    def copied(self, placement: Placement, blocks: int, now: float) -> None:
        """Handle the end of the copy that the request waited for, with `blocks` leading blocks."""
        transfer = placement.transfer
        request = placement.request
        endpoint = placement.endpoint
        transfers = self._transfers
        assert transfer is not None
        assert transfers is not None
        prompt = request.turn.prompt_tokens
        overlap = transfers.landed(transfer, blocks)
        request.outcome.predicted_tokens = min(overlap.tokens, prompt)
        split = split_prompt(prompt, overlap, endpoint.id, self._policy.speeds)
        endpoint.load.begin(placement.reservation, split, now)

    def first_token(self, placement: Placement, now: float) -> None:
        """Handle the beginning of the response."""
        if placement.request.streams:
            placement.endpoint.load.first_token(placement.reservation, now)

    def finished(self, placement: Placement, now: float) -> None:
        """Handle the end of the response, with its usage."""
        endpoint = placement.endpoint
        outcome = placement.request.outcome
        if not placement.request.streams:
            endpoint.load.first_token(placement.reservation, now)
        endpoint.load.release(placement.reservation, now)
        if placement.stay is not None:
            placement.stay.calls_tool = placement.request.turn.calls_tool
            placement.stay.end(now, served=True)
        if outcome.first_token_at is not None:
            endpoint.ended.add_request(placement.reservation)
        predicted = outcome.predicted_tokens
        cached = outcome.cached_tokens if self._reports_cached else 0
        placement.settle(predicted, cached)
        self._policy.observe_reuse(endpoint.id, predicted, cached, now)

    def join(self, endpoint: SimEndpoint) -> None:
        """Add a new engine in the endpoint's place."""
        endpoint.prefills = NOTHING_READ
        self._connect(endpoint)
        self.endpoints.append(endpoint)

    def leave(self, endpoint: SimEndpoint, lost: Iterable[Placement], now: float) -> None:
        """Remove an endpoint and the requests placed there."""
        self.endpoints.remove(endpoint)
        for placement in lost:
            endpoint.load.release(placement.reservation, now)
            if placement.stay is not None:
                placement.stay.end(now, served=False)
        endpoint.load.engine = None
        if self.admission is not None:
            self.admission.forget(endpoint.id)
        self._view.forget(endpoint.index)
        self._policy.forget(endpoint.id)

    def _connect(self, endpoint: SimEndpoint) -> None:
        endpoint.load.on_sample = partial(self._policy.observe_sample, endpoint.id)
        count_live_blocks(endpoint.load, self._policy.counts_live_blocks)

    def _decide(
        self, request: LiveRequest, now: float, *, preferred: EndpointId | None = None
    ) -> Decision[SimEndpoint]:
        turn = request.turn
        pick = PickRequest(
            session_key=str(request.session),
            facts=self.facts_of(request, now),
            preferred=preferred,
            streams=request.streams,
            prompt_head=turn.blocks[0].to_bytes(8, "little") if turn.blocks else b"",
        )
        if self._transfers is not None and self._policy.speeds is not None:
            pick = self._transfers.offer(pick, self.endpoints, self._policy.speeds, now)
        if self.admission is not None:
            pick = self.admission.restrict(pick, self.endpoints, now)
        decision = selector.decide(pick, self.endpoints, self._policy, now)
        assert decision is not None
        return decision

    def facts_of(self, request: LiveRequest, now: float) -> OverlapFacts:
        """Return what is known of its prompt."""
        return self._view.facts(request.turn)

    def _place(self, request: LiveRequest, decision: Decision[SimEndpoint], now: float) -> Placement:
        turn = request.turn
        pick = decision.request
        endpoint = decision.endpoint
        facts = pick.facts
        if self._policy.speeds is not None:
            selector.advance(self.endpoints, self._policy.speeds, now)
        self._policy.placed(pick, self.endpoints, decision.index, now, choice=decision.choice)
        matched = facts.matched_tokens(endpoint.id)
        request.outcome.endpoint = endpoint.index
        request.outcome.placed_at = now
        request.outcome.predicted_tokens = matched
        reservation = reserve(endpoint, pick, self._policy.speeds, now)
        settle = self._view.routed(endpoint.index, turn)
        transfer = None if self._transfers is None else self._transfers.find_transfer(decision)
        priority = 0
        if self._order is not None:
            priority = self._order.find_priority(
                request.outcome, facts, endpoint.id, now, endpoints=len(self.endpoints)
            )
        stay = None if self.admission is None else self.admission.place(pick, endpoint.id, now)
        return Placement(request, endpoint, reservation, settle, priority, transfer, stay=stay)


def least_wait_s(endpoints: Iterable[SimEndpoint], speeds: SpeedModel | None, now: float) -> float:
    """Return the wait of a request at the endpoint where it is shortest; 0 where speeds are not learned."""
    return 0.0 if speeds is None else min((wait_s(one, speeds, now) for one in endpoints), default=0.0)
