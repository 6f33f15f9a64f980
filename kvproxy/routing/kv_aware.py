"""kv_aware: the endpoint where this request costs all requests least, in seconds of prefill.

    cost  = wait + own * (slowness + kappa + stall * in_flight) + foresight * usual_wait
    kappa = (crowding * bound_per_s * (wait + slowness * own / 2) + congestion * arrivals_per_s * mean_wait) / (1 - rho)

`wait` is the pending prefill there, `own` the prefill this request would add: uncached tokens with the attention work
behind them, and bringing lower-tier tokens up. A greedy router stops at wait + slowness * own and is myopic by it:

- Own work delays requests that come to the endpoint because it holds their prefix (bound_per_s), for as long as its
  backlog then takes to be over; a long prompt weighs more than its length.
- Where every endpoint has a backlog, it delays all that come, wherever they go (mean_wait).
- It stalls the sequences decoding there (stall).
- The session comes back to where it went, and finds what is usual there (usual_wait): others may have to leave an
  endpoint that is always busy.

What others suffer is charged in pooled seconds, so that the slow half of a mixed fleet is not starved. Computing a hot
prefix once more is an investment and discounted. Speeds are learned (speeds.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import Random
from typing import cast

from kvproxy.config.policy_schema import KvAwareSettings
from kvproxy.routing.costs import least, own_s
from kvproxy.routing.load import NO_WORK, Features, prefill_s
from kvproxy.routing.policy import Candidate, Choice, OverlapFacts, PickRequest, Policy
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.traffic import ArrivalStats, EndpointArrivals, Utilisation
from kvproxy.types import EndpointId

#: Work is believed to delay at most this many of those bound to the endpoint, and as many of all.
MAX_KAPPA = 9.0

#: A request that takes under this share of the time it would take elsewhere is bound to its endpoint.
BOUND_BELOW = 0.5

#: What a choice has for the placement that may follow: the most tokens that another candidate holds, and the arrivals
#: that were brought up to date.
_Notes = tuple[int, Mapping[EndpointId, EndpointArrivals]]

#: In a pool of so many candidates a choice takes speeds of at most TICK_S ago: what was worked out of an endpoint whose
#: load did not change stands until then.
LARGE = 32
TICK_S = 0.02


class _Pool:
    """One set of candidates by columns, and the speeds that choices among them go by."""

    __slots__ = ("at", "candidates", "ids", "index_of", "loads", "seconds", "slowness", "speeds", "weights")

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.ids = [candidate.id for candidate in candidates]
        self.loads = [candidate.load for candidate in candidates]
        self.weights = [candidate.weight for candidate in candidates]
        self.index_of = {endpoint: index for index, endpoint in enumerate(self.ids)}
        self.speeds: SpeedModel | None = None
        self.at = 0.0  # when the speeds were asked for
        self.seconds: Features = NO_WORK
        self.slowness: Sequence[float] = ()


class KvAware(Policy):
    """Chooses by expected cost and learns the engines' speeds."""

    uses_overlap = True
    learns_speeds = True
    reasons = {
        "overlap": "no other endpoint holds more of this prompt",
        "load": "another endpoint holds more of this prompt, but it would cost more there",
        "no_overlap": "no endpoint is known to hold any of this prompt",
    }
    settings: KvAwareSettings
    speeds: SpeedModel

    def __init__(
        self, *, rng: Random, speeds: SpeedModel | None = None, settings: KvAwareSettings = KvAwareSettings()
    ) -> None:
        super().__init__(rng=rng, settings=settings)
        self.speeds = SpeedModel() if speeds is None else speeds
        self.utilisation = Utilisation()
        self.arrivals = ArrivalStats()
        self._pool: _Pool | None = None  # of the latest candidates

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, settings, pool = request.facts, self.settings, self._pool_of(candidates, now)
        seconds, count = pool.seconds, len(pool.ids)
        owns, held = self._own_s(facts, pool)
        waits = [load.wait_s(seconds, slowness, now) for load, slowness in zip(pool.loads, pool.slowness, strict=True)]
        crowding, congestion = self._delayed_per_s(now)
        delayed = (settings.kappa or 0.0) + min(MAX_KAPPA, congestion * sum(waits) / count)
        stall, foresight = settings.stall, settings.foresight
        arrivals, renewed = self.arrivals.estimate(pool.ids, waits, now)
        costs = [
            (
                wait
                + own * (slowness + stall * load.in_flight)
                + own
                * (
                    delayed
                    + (
                        bound
                        if (bound := crowding * past.bound_per_s * (wait + 0.5 * slowness * own)) < MAX_KAPPA
                        else MAX_KAPPA
                    )
                )
                + foresight * past.usual_wait_s
            )
            / weight
            for wait, own, slowness, load, past, weight in zip(
                waits, owns, pool.slowness, pool.loads, arrivals, pool.weights, strict=True
            )
        ]
        index = least(costs, self._rng)
        elsewhere = max([tokens for other, tokens in held.items() if other != index], default=0) if held else 0
        return Choice(index, reason_of(held, index), costs, (elsewhere, renewed))

    def _own_s(self, facts: OverlapFacts, pool: _Pool) -> tuple[list[float], Mapping[int, int]]:
        """Pooled seconds of the request's own prefill by candidate, and the tokens held by those that hold any."""
        request_s, token_s, attention_s, lower_s = pool.seconds
        prompt = facts.prompt_tokens
        hot, saving = min(facts.hot_tokens, prompt), 1.0 - self.settings.hot_discount
        own = request_s + prompt * (token_s + attention_s * (0.5 * prompt))
        if hot > 0:
            own *= 1.0 - saving * hot / prompt
        owns, held = [own] * len(pool.ids), {}  # most endpoints hold nothing, and are alike in that
        for endpoint, overlap in facts.by_endpoint.items():
            index = pool.index_of.get(endpoint)
            if index is None:
                continue
            lower = overlap.lower_tokens
            matched = overlap.device_tokens + lower
            if matched > prompt:
                matched = prompt
            uncached = prompt - matched
            own = request_s + uncached * (token_s + attention_s * (matched + 0.5 * uncached))
            if hot > matched:
                own *= 1.0 - saving * (hot - matched) / uncached
            if lower:
                own += lower_s * min(lower, matched)
            owns[index], held[index] = own, matched
        return owns, held

    def _pool_of(self, candidates: Sequence[Candidate], now: float) -> _Pool:
        """What choices need of these candidates; of a large pool with speeds of at most `TICK_S` ago."""
        pool, speeds = self._pool, self.speeds
        if pool is None or pool.candidates is not candidates:
            pool = _Pool(candidates)
            if isinstance(candidates, tuple):  # the same one is the same endpoints, with the same weights
                self._pool = pool
        if len(pool.ids) < LARGE or pool.speeds is not speeds or not 0.0 <= now - pool.at < TICK_S:
            pool.speeds, pool.at = speeds, now
            pool.seconds, pool.slowness = speeds.seconds, speeds.slowness_of_all(pool.ids, now)
        return pool

    def placed(
        self, request: PickRequest, candidates: Sequence[Candidate], index: int, now: float, *, choice: Choice | None
    ) -> None:
        """Count the work towards the pool's utilisation, and the request among those bound to its endpoint if it is."""
        facts, endpoint = request.facts, candidates[index].id
        if choice is not None:
            elsewhere, renewed = cast("_Notes", choice.notes)
            self.arrivals.update(renewed)
        else:
            others = (facts.matched_tokens(other) for other in facts.by_endpoint if other != endpoint)
            elsewhere = max(others, default=0)
        own = own_s(facts, endpoint, self.speeds)
        self.utilisation.add(own, len(candidates), now)
        if len(candidates) > 1 and own < BOUND_BELOW * prefill_s(
            facts.prompt_tokens - elsewhere, elsewhere, 0, self.speeds.seconds
        ):
            self.arrivals.record_arrival(endpoint)

    def _delayed_per_s(self, now: float) -> tuple[float, float]:
        """How many of each bound request a second, and how many altogether, a second of backlog delays; none where
        kappa is constant."""
        settings = self.settings
        if settings.kappa is not None:
            return 0.0, 0.0
        rho, arrivals_per_s = self.utilisation.rates(now)
        idle = 1.0 - rho
        return settings.crowding / idle, settings.congestion * arrivals_per_s / idle

    def estimates(self, now: float) -> Mapping[str, object]:
        known, (rho, arrivals_per_s) = self.arrivals.known(), self.utilisation.rates(now)
        return {
            **asdict(self.speeds.estimates(now)),
            "rho": rho,
            "arrivals_per_s": arrivals_per_s,
            "bound_per_s": {endpoint: past.bound_per_s for endpoint, past in known.items()},
            "usual_wait_s": {endpoint: past.usual_wait_s for endpoint, past in known.items()},
        }

    def observe_sample(
        self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool = False
    ) -> None:
        self.speeds.observe(endpoint, work, busy_s, now, scraped=scraped)

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)
        self.arrivals.forget(endpoint)
        self._pool = None


def reason_of(held: Mapping[int, int], index: int) -> str:
    """How the choice stands to what is cached, by candidate: `overlap` (none holds more), `load` (one does),
    `no_overlap`."""
    best = max(held.values()) if held else 0
    if best == 0:
        return "no_overlap"
    return "overlap" if held.get(index) == best else "load"
