"""kv_aware: the endpoint where this request costs all requests least, in seconds of prefill.

    cost  = wait + own * (slowness + kappa + stall * in_flight) + foresight * usual_wait
    kappa = (crowding * bound_per_s * (wait + slowness * own / 2) + congestion * arrivals_per_s * mean_wait) / (1 - rho)

`wait` is the pending prefill there, `own` the prefill this request would add: uncached tokens with the attention work
behind them, and bringing lower-tier tokens up. A greedy router stops at wait + slowness * own and is myopic by it:

- Own work delays those who come to the endpoint because it holds their prefix (bound_per_s), for as long as its backlog
  then takes to be over; a long prompt weighs more than its length.
- Where every endpoint has a backlog, it delays all who come, wherever they go (mean_wait).
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
from typing import NamedTuple

from kvproxy.config.policy_schema import KvAwareSettings
from kvproxy.routing.arrivals import ArrivalStats, EndpointArrivals
from kvproxy.routing.forecast import own_s
from kvproxy.routing.least import least
from kvproxy.routing.load import Features, features_of, seconds_of
from kvproxy.routing.policy import Candidate, Choice, PickRequest, Policy
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.utilisation import Utilisation
from kvproxy.types import EndpointId

#: Work is believed to delay at most this many of those bound to the endpoint, and as many of all.
MAX_KAPPA = 9.0

#: A request that takes under this share of the time it would take elsewhere is bound to its endpoint.
BOUND_BELOW = 0.5


class _Notes(NamedTuple):
    """What a choice has for the placement that may follow it."""

    held_elsewhere: int  # the most tokens that another candidate holds
    arrivals: Mapping[EndpointId, EndpointArrivals]  # brought up to date


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

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts, settings = request.facts, self.settings
        by_endpoint, prompt = facts.by_endpoint, facts.prompt_tokens
        hot = min(facts.hot_tokens, prompt)
        slowness_of, seconds = self.speeds.slowness, self.speeds.seconds
        request_s, token_s, attention_s, lower_s = seconds
        stall, saving = settings.stall, 1.0 - settings.hot_discount
        ids, held, owns, waits, ends, costs = [], [], [], [], [], []
        for candidate in candidates:
            endpoint, load = candidate.id, candidate.load
            overlap = by_endpoint.get(endpoint)
            if overlap is None:
                matched = lower = 0
            else:
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
            slowness = slowness_of(endpoint, now)
            wait = load.wait_s(seconds, slowness, now)
            ids.append(endpoint)
            held.append(matched)
            owns.append(own)
            waits.append(wait)
            ends.append(wait + 0.5 * slowness * own)
            costs.append(wait + own * (slowness + stall * load.in_flight))
        crowding, congestion = self._delayed_per_s(now)
        everywhere = (settings.kappa or 0.0) + min(MAX_KAPPA, congestion * sum(waits) / len(waits))
        foresight = settings.foresight
        arrivals, renewed = self.arrivals.estimate(ids, waits, now)
        for index, past in enumerate(arrivals):
            bound = crowding * past.bound_per_s * ends[index]
            delayed = everywhere + (bound if bound < MAX_KAPPA else MAX_KAPPA)
            cost = costs[index] + owns[index] * delayed + foresight * past.usual_wait_s
            costs[index] = cost / candidates[index].weight
        index = least(costs, self._rng)
        notes = _Notes(max(held[:index] + held[index + 1 :], default=0), renewed)
        return Choice(index, reason_of(held, index), costs, notes)

    def placed(
        self, request: PickRequest, candidates: Sequence[Candidate], index: int, now: float, *, choice: Choice | None
    ) -> None:
        """Count the work towards the pool's utilisation, and the request among those bound to its endpoint if it is."""
        facts, endpoint = request.facts, candidates[index].id
        if choice is not None:
            assert isinstance(choice.notes, _Notes)
            elsewhere, renewed = choice.notes
            self.arrivals.update(renewed)
        else:
            others = (facts.matched_tokens(other) for other in facts.by_endpoint if other != endpoint)
            elsewhere = max(others, default=0)
        own = own_s(facts, endpoint, self.speeds)
        self.utilisation.add(own, len(candidates), now)
        if len(candidates) > 1 and own < BOUND_BELOW * seconds_of(
            features_of(facts.prompt_tokens - elsewhere, elsewhere), self.speeds.seconds
        ):
            self.arrivals.record_arrival(endpoint)

    def _delayed_per_s(self, now: float) -> tuple[float, float]:
        """How many of each bound request a second, and how many altogether, a second of backlog delays; none where
        kappa is constant."""
        settings, pool = self.settings, self.utilisation
        if settings.kappa is not None:
            return 0.0, 0.0
        idle = 1.0 - pool.rho(now)
        return settings.crowding / idle, settings.congestion * pool.arrivals_per_s(now) / idle

    def estimates(self, now: float) -> Mapping[str, object]:
        known = self.arrivals.known()
        return {
            **asdict(self.speeds.estimates(now)),
            "rho": self.utilisation.rho(now),
            "arrivals_per_s": self.utilisation.arrivals_per_s(now),
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


def reason_of(held: Sequence[int], index: int) -> str:
    """How the choice stands to what is cached: `overlap` (none holds more), `load` (one does), `no_overlap`."""
    best = max(held)
    if best == 0:
        return "no_overlap"
    return "overlap" if held[index] == best else "load"
