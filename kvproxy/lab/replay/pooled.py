"""The pooled reference: N engines that share one cache of N times the size, routed by exact least work.

Each engine holds whatever any of them computed, so that load is all there is to balance; of that the routing is greedy,
so it is no bound: a policy that looks further ahead, or an order of admission, can beat it.
Requests that one engine alone could not hold are rejected as they are without the pool. Its saturated throughput is
what "load 1.0" means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvproxy.base.errors import KvproxyError
from kvproxy.cluster.routing.costs import least
from kvproxy.cluster.routing.policy import Candidate, Choice, Overlap, OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.work import Features, features_of, seconds_of
from kvproxy.lab.replay.results import GoodputLimits, ReplayOutcome, Summary, summarize_outcomes
from kvproxy.lab.replay.router import SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace, Turn
from kvproxy.lab.replay.view import CacheView, endpoint_id
from kvproxy.lab.replay.virtual_time import VirtualTime
from kvproxy.lab.simulator.block_cache import BlockCache
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import FirstToken, Rejected, SimRequest
from kvproxy.lab.simulator.timing import TokenGaps

#: Surplus of sessions in flight over the wanted rate, so that turns do not wait for turns.
_SESSION_RESERVE = 1.25
_CALIBRATION_RUNS = 4
_RATE_TOLERANCE = 0.02
_WAITING_WHEN_FED = 2  # an engine with fewer requests waiting is fed, so that saturated engines never run dry


class NothingFits(KvproxyError):
    """No request of a trace fits an engine's cache."""


class PooledCache(BlockCache):
    """Engines plan their steps one by one, each against all the free blocks, so that two plans may want the same one.
    The pool then lends blocks beyond its capacity and takes them back as soon as any is free."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks, record_events=False)
        self._lent = 0

    def allocate(self, count: int) -> list[int]:
        for _ in range(count - len(self._free)):
            self._free[len(self._users)] = None
            self._users.append(0)
            self._hash_of.append(None)
            self._lent += 1
        return super().allocate(count)

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        while self._lent and self._free:
            super().allocate(1)  # never released again
            self._lent -= 1


class PooledFleet(CacheView):
    """Engines over one cache, which is asked itself: there is nothing to claim and nothing to learn."""

    def __init__(self, fleet: ReplayFleet, block_size: int, *, duration_s: float = math.inf) -> None:
        settings = [fleet.engine_settings(block_size, index, duration_s) for index in range(fleet.instances)]
        self._cache = PooledCache(settings[0].capacity_blocks * fleet.instances)
        self._block_size = block_size
        self._ids = [endpoint_id(index) for index in range(fleet.instances)]
        self.endpoints = [
            SimEndpoint(self._ids[index], index, Engine(each, cache=self._cache)) for index, each in enumerate(settings)
        ]

    def cached_tokens(self, turn: Turn) -> int:
        """Leading tokens the pool holds."""
        limit = (turn.prompt_tokens - 1) // self._block_size
        return self._block_size * self._cache.match_prefix(turn.blocks, limit)

    def facts(self, turn: Turn) -> OverlapFacts:
        """Return the same for every engine."""
        overlap = Overlap(self.cached_tokens(turn))
        return OverlapFacts(turn.prompt_tokens, dict.fromkeys(self._ids, overlap))


class ExactLeastWork(Policy):
    """Least wait and own time by the engines' true speeds."""

    def __init__(self, fleet: ReplayFleet, *, rng: Random) -> None:
        self.seconds = average_seconds(fleet)
        self._slowness = {endpoint_id(index): factor for index, factor in enumerate(fleet.slowness)}
        super().__init__(rng=rng)

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """Among equals the smaller batch: it decodes, and so prefills, faster."""
        facts = request.facts
        costs = []
        for candidate in candidates:
            slowness = self._slowness.get(candidate.id, 1.0)
            matched = facts.matched_tokens(candidate.id)
            own_s = seconds_of(features_of(facts.prompt_tokens - matched, matched), self.seconds)
            wait_s = candidate.load.wait_s(self.seconds, slowness, now)
            costs.append(wait_s + slowness * own_s * (1.0 + 0.05 * candidate.load.in_flight))
        return Choice(least(costs, self._rng), "exact", costs)


@dataclass(frozen=True, slots=True)
class Bound:
    """A trace paced to a load, and what the pooled cache makes of it."""

    trace: Trace
    pace: Pace
    capacity_per_s: float  # requests a second that are load 1.0
    summary: Summary


def average_seconds(fleet: ReplayFleet) -> Features:
    """Seconds for one unit of each feature on an average engine; a decode step accompanies each prefill."""
    timing = fleet.timing
    token_s = 1 / timing.prefill_tokens_per_s
    return (timing.prefill_step_s + timing.decode_step_s, token_s, token_s / timing.quadratic_tokens, 0.0)


def measure_throughput(trace: Trace, fleet: ReplayFleet) -> float:
    """Return requests a second when there is always one more: first tokens of the whole trace over the time they took.
    Raises NothingFits when there is none.
    """
    blocks = fleet.blocks_of(trace)
    pool = PooledFleet(fleet, blocks.size)
    seconds = average_seconds(fleet)
    engines = [endpoint.engine for endpoint in pool.endpoints]
    turns = [turn for _, turn in reversed(trace.turns_in_nominal_order(service_s=5.0))]
    pending_s = [0.0] * len(engines)
    placed: dict[str, tuple[int, float]] = {}
    now = 0.0
    served = 0
    while turns or placed:
        while turns:
            index = min(range(len(engines)), key=lambda i: (engines[i].load.waiting, pending_s[i]))
            if engines[index].load.waiting >= _WAITING_WHEN_FED:
                break
            turn = blocks.split(turns.pop())
            cached = pool.cached_tokens(turn)
            own_s = seconds_of(features_of(turn.prompt_tokens - cached, cached), seconds)
            name = str(len(turns))
            placed[name] = (index, own_s)
            pending_s[index] += own_s
            engines[index].submit(SimRequest(name, turn.blocks, turn.prompt_tokens, turn.output_tokens), now)
        now, index = min((at, i) for i, engine in enumerate(engines) if (at := engine.next_event_at()) is not None)
        for output in engines[index].advance(now):
            if isinstance(output, FirstToken | Rejected):
                where, own_s = placed.pop(output.request_id)
                pending_s[where] -= own_s
                served += isinstance(output, FirstToken)
        for engine in engines:
            engine.wake(now)
    if not served:
        raise NothingFits(_why_nothing_fits(trace, fleet))
    return served / now


def _why_nothing_fits(trace: Trace, fleet: ReplayFleet) -> str:
    least = min(turn.prompt_tokens + turn.output_tokens for session in trace.sessions for turn in session.turns)
    return (
        f"no request of the trace fits an engine's cache of {fleet.capacity_tokens} tokens, and the shortest has "
        f"{least} with its answer: raise --capacity-tokens"
    )


def measure_bound(
    trace: Trace, fleet: ReplayFleet, load: float, *, closed_loop: bool = True, limits: GoodputLimits = GoodputLimits()
) -> Bound:
    """Paces the trace to `load` and plays it on the pool.

    A closed loop is adjusted until the pool's arrivals are right; sessions are cloned where too few would be under way.
    """
    capacity = measure_throughput(trace, fleet)
    wanted = load * capacity
    closed_loop = closed_loop and trace.has_sessions
    if closed_loop:
        trace = trace.clone(_copies_for(trace, wanted))
    pace = Pace(_first_scale(trace, wanted), closed_loop)
    for _ in range(_CALIBRATION_RUNS):
        token_gaps = TokenGaps()
        outcomes = play_on_pool(trace, pace, fleet, token_gaps=token_gaps)
        rate = measure_offered_rate(outcomes) if trace.has_sessions else wanted
        if abs(rate / wanted - 1.0) < _RATE_TOLERANCE:
            break
        pace = replace(pace, scale=pace.scale * max(0.25, min(4.0, rate / wanted)))
    summary = summarize_outcomes(outcomes, fleet.instances, token_gaps=token_gaps, limits=limits)
    return Bound(trace, pace, capacity, summary)


def play_on_pool(
    trace: Trace, pace: Pace, fleet: ReplayFleet, *, token_gaps: TokenGaps | None = None
) -> Sequence[ReplayOutcome]:
    """One run of the pool; `token_gaps` is given the times between tokens."""
    blocks = fleet.blocks_of(trace)
    pool = PooledFleet(fleet, blocks.size, duration_s=pace.duration_s(trace))
    router = VirtualRouter(pool.endpoints, ExactLeastWork(fleet, rng=Random(1)), pool)
    outcomes = VirtualTime(blocks, pace, router, pool, sharing=pool.endpoints).run()
    if token_gaps is not None:
        for endpoint in pool.endpoints:
            token_gaps.update(endpoint.engine.scheduler.counters.token_gaps)
    return outcomes


def measure_offered_rate(outcomes: Sequence[ReplayOutcome]) -> float:
    """Arrivals a second between the first tenth and the last fifth, where sessions neither start up nor run out."""
    arrivals = sorted(outcome.arrived_at for outcome in outcomes)
    first = len(arrivals) // 10
    last = len(arrivals) * 8 // 10
    span = arrivals[last] - arrivals[first] if arrivals else 0.0
    return (last - first) / span if span > 0.0 else 0.0


def _first_scale(trace: Trace, wanted: float) -> float:
    span = trace.sessions[-1].start_s
    return (trace.requests - 1) / wanted / span if span > 0.0 and trace.requests > 1 else 1.0


def _copies_for(trace: Trace, wanted: float) -> int:
    """So many that the sessions under way at once can produce the wanted rate."""
    length_s = sum(turn.delay_s + 2.5 for session in trace.sessions for turn in session.turns) / len(trace.sessions)
    turns = trace.requests / len(trace.sessions)
    return math.ceil(_SESSION_RESERVE * wanted / turns * length_s / len(trace.sessions))
