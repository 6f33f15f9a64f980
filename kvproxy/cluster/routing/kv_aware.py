"""kv_aware: the endpoint where this request costs all requests least, in seconds of prefill.

    cost  = wait + own * (slowness + delay + stall * stalled) + usual_waits * usual_wait
    delay = crowding * bound_per_s * (wait + slowness * own / 2) + congestion * arrivals_per_s * mean_wait / (1 - rho)

Costs are divided by the endpoint's weight, and each of the two terms of `delay` counts up to MAX_DELAYED.

`wait` is the pending prefill there, `own` the prefill this request would add: uncached tokens with the attention work
behind them, and bringing up what is on lower tiers. A greedy router stops at wait + slowness * own and is myopic by it:

- Own work delays requests that come to the endpoint because it holds their prefix (bound_per_s), while its backlog and
  half of the work last; a long prompt weighs more than its length. Those who then still wait are no more: sessions that
  wait send nothing, and others go elsewhere.
- Where every endpoint has a backlog, it delays all that come, wherever they go (mean_wait), the longer the busier.
- It stalls the sequences decoding there (stall), up to 60 of them: in a large batch decoding is slow already, and what
  a request saves by waiting for one endpoint is soon less than it waits. Where there are as many on every endpoint, up
  to 15 count that are more here.
- The session comes back to where it went, and finds what is usual there (usual_wait): others may have to leave an
  endpoint that is always busy.

For all that a request may wait longer where it saves work, but not to leave room: it does not go where its first token
would take twice as long, and 50 ms, as at the soonest endpoint where it adds no more work. (Each second beyond counts a
thousandfold.) A request for an adapter also costs the seconds until it is loaded there (cluster/adapters.py).

The cost to others is charged in pooled seconds, so that the slow half of a mixed fleet is not starved. Computing a hot
prefix once more is an investment and discounted. Speeds are learned (speeds.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random

from kvproxy.base.types import EndpointId, count_lower
from kvproxy.cluster.routing.costs import least, onboarding_s_of, own_s
from kvproxy.cluster.routing.policy import Candidate, Choice, OverlapFacts, PickRequest, Policy
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.traffic import ArrivalStats, EndpointArrivals, Pool, PoolSpeeds, Utilisation
from kvproxy.cluster.routing.work import Features, prefill_s

MAX_DELAYED = 9.0  # work delays at most this many of those bound to the endpoint, and as many of all
#: Most sequences that count as stalled by a prefill: with hundreds in flight nothing else would decide.
MAX_STALLED = 60
#: Where all endpoints have as many, this many still count of one endpoint's surplus: without it they would drift apart
#: until some run out of slots.
MAX_UNEVEN = 15
#: A request is late where its first token takes this many times the least among the endpoints where it adds no more
#: work, and LATE_SLACK_S; each second it is late by counts LATE_COST seconds: it is as good as never sent there.
LATE_FROM = 2.0
LATE_SLACK_S = 0.05
LATE_COST = 1000.0
BOUND_BELOW = 0.5  # a request with less than this share of the time it would take elsewhere is bound to its endpoint
#: In a pool of this many candidates a choice uses the speeds of a placement at most TICK_S ago: estimates of endpoints
#: with unchanged load are kept until then.
LARGE = 32
TICK_S = 0.02


class _CostedChoice(Choice, frozen=True, kw_only=True):
    """With what the placement that may follow counts and remembers."""

    own_s: float  # pooled seconds of the request's prefill where it goes
    bound: bool  # it would take much longer elsewhere
    speeds: PoolSpeeds
    arrivals: Sequence[EndpointArrivals]


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Weights of the cost, as measured (benchmarks/reports/routing-constants.md)."""

    crowding: float = 0.25  # share of those bound to the endpoint and expected during its backlog that own work delays
    congestion: float = 0.2  # share of all those expected during the pool's mean backlog that it delays
    stall: float = 0.04  # cost of own work to each sequence it stalls there
    usual_waits: float = 0.4  # that count: about as many turns as the session still has, discounted
    hot_discount: float = 0.25  # weight of a missing hot token


class KvAware(Policy):
    """Chooses by expected cost and learns the engines' speeds."""

    uses_overlap = True
    learns_speeds = True
    reasons = {
        "overlap": "no other endpoint holds more of this prompt",
        "load": "another endpoint holds more of this prompt, but it would cost more there",
        "no_overlap": "no endpoint is known to hold any of this prompt",
    }
    speeds: SpeedModel

    def __init__(
        self,
        *,
        rng: Random,
        speeds: SpeedModel | None = None,
        weights: CostWeights = CostWeights(),
    ) -> None:
        super().__init__(rng=rng)
        self._weights = weights.crowding, weights.congestion, weights.stall, weights.usual_waits
        self._saving = 1.0 - weights.hot_discount
        self.speeds = SpeedModel() if speeds is None else speeds
        self.utilisation = Utilisation()
        self.arrivals = ArrivalStats()
        self._pool: Pool | None = None  # of the latest candidates
        self._latest: PoolSpeeds | None = None  # of the latest placement, where it was in a large pool

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        speeds = self._speeds_of(candidates, now)
        pool = speeds.pool
        seconds = speeds.seconds
        slowness = speeds.slowness
        owns, held = self._own_s(facts, pool, seconds)
        waits = []
        firsts = []
        costs = []
        least_in_flight = math.inf
        # Loops, not comprehensions: these are functions of their own to Python 3.11, with cells for names.
        for load, slow in zip(pool.loads, slowness, strict=True):
            in_flight = load.in_flight
            waits.append(load.wait_s(seconds, slow, now) if in_flight else 0.0)
            if in_flight < least_in_flight:
                least_in_flight = in_flight
        everywhere = least_in_flight if least_in_flight < MAX_STALLED else MAX_STALLED
        most_uneven = max(MAX_UNEVEN, MAX_STALLED - least_in_flight)
        arrivals = self.arrivals.estimate(pool.ids, waits, now)
        crowding, congestion, stall, usual_waits = self._weights
        rho, arrivals_per_s = self.utilisation.estimate_rates(now)
        delayed = congestion * arrivals_per_s / (1.0 - rho) * sum(waits) / len(waits)
        if delayed > MAX_DELAYED:
            delayed = MAX_DELAYED
        columns = zip(waits, owns, slowness, pool.loads, arrivals, pool.weights, strict=True)
        for wait, own, slow, load, past, weight in columns:
            bound_s = crowding * past.bound_per_s * (wait + 0.5 * slow * own)
            delay = delayed + (bound_s if bound_s < MAX_DELAYED else MAX_DELAYED)
            stalled = load.in_flight - least_in_flight
            if stalled > most_uneven:
                stalled = most_uneven
            cost = wait + own * (slow + stall * (everywhere + stalled)) + own * delay + usual_waits * past.usual_wait_s
            costs.append(cost / weight)
            firsts.append((wait + own * slow) / weight)
        if request.adapter_s is not None or request.transfer_s is not None:
            costs = with_preparation(costs, request, pool)
            firsts = with_preparation(firsts, request, pool)
        if max(firsts) > LATE_FROM * min(firsts) + LATE_SLACK_S:
            costs = with_lateness(costs, firsts, owns)
        index = least(costs, self._rng)
        if self.others is not None:
            work_s = rho * len(owns)
            index = self.others.choose_spread(index, costs, pool.weights, pool.places, owns[index], work_s)
        here = 0
        elsewhere = 0
        if held:
            here = held[index]
            elsewhere = max([*held[:index], *held[index + 1 :]], default=0)
        reason = "overlap" if here and here >= elsewhere else "load" if elsewhere else "no_overlap"
        own = owns[index]
        if facts.hot_tokens:
            own = own_s(facts, pool.ids[index], self.speeds)  # hot tokens are work as well
        bound = here > elsewhere and is_bound(own, facts, elsewhere, len(owns), seconds)
        return _CostedChoice(index, reason, costs, own_s=own, bound=bound, speeds=speeds, arrivals=arrivals)

    def _own_s(self, facts: OverlapFacts, pool: Pool, seconds: Features) -> tuple[list[float], list[int]]:
        """Pooled seconds of the request's own prefill by candidate, hot tokens discounted, and the tokens each holds;
        empty where none holds any."""
        request_s, token_s, attention_s, _ = seconds
        prompt = facts.prompt_tokens
        count = len(pool.ids)
        hot = min(facts.hot_tokens, prompt)
        saving = self._saving
        own = request_s + prompt * (token_s + attention_s * (0.5 * prompt))
        if hot > 0:
            own *= 1.0 - saving * hot / prompt
        owns = [own] * count  # most endpoints hold nothing, and are alike in that
        if not facts.by_endpoint:
            return owns, []
        held = [0] * count
        index_of = pool.index_of
        matched = 0
        known = None
        for endpoint, overlap in facts.by_endpoint.items():
            index = index_of.get(endpoint)
            if index is None:
                continue
            if overlap is not known:  # endpoints with the same overlap share one object
                known = overlap
                matched = overlap.device_tokens
                if overlap.lower:
                    matched += count_lower(overlap.lower)
                if matched > prompt:
                    matched = prompt
                uncached = prompt - matched
                own = request_s + uncached * (token_s + attention_s * (matched + 0.5 * uncached))
                if hot > matched:
                    own *= 1.0 - saving * (hot - matched) / uncached
            owns[index], held[index] = own, matched
            if overlap.lower:
                owns[index] += onboarding_s_of(overlap, prompt, endpoint, self.speeds)
        return owns, held

    def _speeds_of(self, candidates: Sequence[Candidate], now: float) -> PoolSpeeds:
        """Those at present; of a large pool those of the latest placement, if that is not long ago."""
        pool = self._pool
        model = self.speeds
        latest = self._latest
        if pool is None or pool.candidates is not candidates:
            pool = Pool(candidates)
            if isinstance(candidates, tuple):  # the same tuple has the same endpoints, with the same weights
                self._pool = pool
        elif latest is not None and latest.pool is pool and latest.model is model and 0.0 <= now - latest.at < TICK_S:
            return latest
        return PoolSpeeds(pool, model, now, model.seconds, model.slowness_of_all(pool.ids, now))

    def placed(
        self, request: PickRequest, candidates: Sequence[Candidate], index: int, now: float, *, choice: Choice | None
    ) -> None:
        """Count the work towards the pool's utilisation, and the request among those bound to its endpoint if it is.

        State for later choices is kept here and not in `choose`, which must change nothing."""
        count = len(candidates)
        if isinstance(choice, _CostedChoice):
            own = choice.own_s
            bound = choice.bound
            speeds = choice.speeds
            self._latest = speeds if count >= LARGE else None
            self.arrivals.update(speeds.pool.ids, choice.arrivals)
        else:
            facts = request.facts
            endpoint = candidates[index].id
            others = [facts.matched_tokens(other) for other in facts.by_endpoint if other != endpoint]
            seconds = self.speeds.seconds
            own = own_s(facts, endpoint, self.speeds)
            bound = is_bound(own, facts, max(others, default=0), count, seconds)
        self.utilisation.add(own, count, now)
        if bound:
            self.arrivals.record_arrival(candidates[index].id)
        if self.on_placed is not None:
            self.on_placed(candidates[index].id, own, bound)

    def placed_elsewhere(
        self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, endpoints: int, now: float
    ) -> None:
        self.utilisation.add(routed_s, endpoints, now, requests=requests)
        self.arrivals.record_arrival(endpoint, requests=bound)

    def estimates(self, now: float) -> Mapping[str, object]:
        known, (rho, arrivals_per_s) = self.arrivals.known(), self.utilisation.estimate_rates(now)
        return {
            **asdict(self.speeds.estimates(now)),
            "rho": rho,
            "arrivals_per_s": arrivals_per_s,
            "bound_per_s": {endpoint: past.bound_per_s for endpoint, past in known.items()},
            "usual_wait_s": {endpoint: past.usual_wait_s for endpoint, past in known.items()},
        }

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)
        self.arrivals.forget(endpoint)
        self._pool = None


def is_bound(own: float, facts: OverlapFacts, elsewhere: int, count: int, seconds: Features) -> bool:
    """Return True if a request that takes `own` seconds here would take much longer where `elsewhere` tokens are
    cached, at one of `count` endpoints."""
    return count > 1 and own < BOUND_BELOW * prefill_s(facts.prompt_tokens - elsewhere, elsewhere, 0, seconds)


def with_preparation(values_s: list[float], request: PickRequest, pool: Pool) -> list[float]:
    """Return seconds by candidate with those until its adapter is loaded and its KV copied there."""
    for more in (request.adapter_s, request.transfer_s):
        if more is not None:
            columns = zip(values_s, pool.ids, pool.weights, strict=True)
            values_s = [value + more.get(id_, 0.0) / weight for value, id_, weight in columns]
    return values_s


def with_lateness(costs: Sequence[float], firsts: Sequence[float], owns: Sequence[float]) -> list[float]:
    """Return the costs with what the request is late by: `firsts` are the seconds until its first token, `owns` those
    of the work it adds."""
    soonest: dict[float, float] = {}  # by work
    for own, first in zip(owns, firsts, strict=True):
        if first < soonest.get(own, math.inf):
            soonest[own] = first
    least_s = math.inf
    limits = {}
    for own in sorted(soonest):
        least_s = min(least_s, soonest[own])
        limits[own] = LATE_FROM * least_s + LATE_SLACK_S
    columns = zip(costs, firsts, owns, strict=True)
    return [cost + LATE_COST * (first - limits[own]) if first > limits[own] else cost for cost, first, own in columns]
