"""kv_aware: the endpoint where this request costs everybody least, in seconds of prefill.

    cost = wait + own * (slowness + kappa + stall * in_flight)

`wait` is the pending prefill there, `own` the prefill this request would add: uncached tokens with the attention work
behind them, and bringing lower-tier tokens up. A greedy router stops at wait + slowness * own and is myopic by it:
own work also delays those who come while the endpoint is busy with it (kappa: the longer the backlog would last, the
more of them, so a long prompt weighs more than its length) and stalls the sequences decoding there (stall). That part
is charged in pooled seconds, so that the slow half of a mixed fleet is not starved. Computing a hot prefix once more is
an investment and discounted. Speeds are learned (speed.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from random import Random

from pydantic import Field

from kvproxy.balancing.forecast import own_s
from kvproxy.balancing.least import least
from kvproxy.balancing.load import Features
from kvproxy.balancing.policy import Candidate, Choice, PickRequest
from kvproxy.balancing.speed import SpeedModel
from kvproxy.balancing.utilisation import Utilisation
from kvproxy.config.model import Model
from kvproxy.types import EndpointId

#: No backlog is believed to delay more than this many others.
MAX_KAPPA = 9.0


class KvAwareSettings(Model):
    """Weights of the cost."""

    kappa: float | None = Field(default=None, ge=0, le=10)
    """What a second of own work costs those who come after; None: `crowding` of those expected until the endpoint
    would be idle again."""
    crowding: float = Field(default=0.15, ge=0, le=10)
    """Share of those who come meanwhile that own work delays; the others go elsewhere."""
    stall: float = Field(default=0.05, ge=0, le=1)
    """What it costs each sequence in flight there; 0.1 goes with a constant kappa of 1."""
    hot_discount: float = Field(default=0.25, ge=0, le=1)
    """What a missing hot token counts."""


class KvAware:
    """Chooses by expected cost and learns the engines' speeds (a Learner)."""

    def __init__(
        self, *, rng: Random, speeds: SpeedModel | None = None, settings: KvAwareSettings = KvAwareSettings()
    ) -> None:
        self.speeds = SpeedModel() if speeds is None else speeds
        self.utilisation = Utilisation()
        self._rng = rng
        self.settings = settings

    def kappa_per_s(self, now: float) -> float:
        """How many more each second of backlog would delay; 0 where kappa is constant."""
        if self.settings.kappa is not None:
            return 0.0
        pool = self.utilisation
        return self.settings.crowding * pool.arrivals_per_s(now) / (1.0 - pool.rho(now))

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        facts = request.facts
        by_endpoint, prompt = facts.by_endpoint, facts.prompt_tokens
        hot = min(facts.hot_tokens, prompt)
        slowness_of, seconds = self.speeds.slowness, self.speeds.seconds
        request_s, token_s, attention_s, lower_s = seconds
        settings = self.settings
        kappa, kappa_per_s = settings.kappa or 0.0, self.kappa_per_s(now)
        stall, saving = settings.stall, 1.0 - settings.hot_discount
        costs, held = [], []
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
            cost = load.wait_s(seconds, slowness, now) + own * slowness  # when the backlog would be over
            delayed = kappa + min(MAX_KAPPA, kappa_per_s * cost)
            cost += own * (delayed + stall * load.in_flight)
            costs.append(cost / candidate.weight)
            held.append(matched)
        index = least(costs, self._rng)
        self.placed(request, candidates[index].id, len(candidates), now)
        return Choice(index, reason_of(held, index), costs)

    def learned(self, now: float) -> Mapping[str, object]:
        """The present estimates."""
        estimates = asdict(self.speeds.estimates(now))
        return {**estimates, "rho": self.utilisation.rho(now), "kappa_per_s": self.kappa_per_s(now)}

    def observe_sample(self, endpoint: EndpointId, work: Features, busy_s: float, now: float) -> None:
        self.speeds.observe(endpoint, work, busy_s, now)

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        """Nothing: a wrong prediction shows in the samples, and who made it answers for it (trust.py)."""

    def forget(self, endpoint: EndpointId) -> None:
        self.speeds.forget(endpoint)

    def placed(self, request: PickRequest, endpoint: EndpointId, endpoints: int, now: float) -> None:
        """Count the work towards the pool's utilisation."""
        if self.settings.kappa is None:
            self.utilisation.add(own_s(request.facts, endpoint, self.speeds), endpoints, now)


def reason_of(held: Sequence[int], index: int) -> str:
    """How the choice stands to what is cached: `overlap` (nobody holds more), `load` (somebody does), `no_overlap`."""
    best = max(held)
    if best == 0:
        return "no_overlap"
    return "overlap" if held[index] == best else "load"
