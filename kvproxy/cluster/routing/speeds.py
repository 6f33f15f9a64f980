"""Prefill speeds of one pool's engines, learned from a router's observations; plain data that survives the process.

Pooled weighted least squares over three features (requests, uncached tokens, attention work), and for each endpoint one
log factor against the pool. Every sample is clipped, so that a wrong cache prediction or a pause moves the estimates a
little and never breaks them. The cost of loading tokens from lower tiers is learned separately (onboarding.py)."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvproxy.base.types import EndpointId, LowerTokens, Tier
from kvproxy.cluster.routing.onboarding import OnboardingCosts, OnboardingSums
from kvproxy.cluster.routing.work import Features

_SWEEPS = 3  # sweeps of coordinate descent per sample; the next sample continues from there
_SCALE_BOUND = 20.0  # a coefficient stays within this factor of the common scale
_LOG_BOUND = 2.5  # bound of an endpoint's log factor
_RECENTRE = 0.05  # share of the mean log factor removed per sample, so that factors stay relative to the pool


@dataclass(frozen=True, slots=True)
class SpeedPriors:
    """Estimates before the first sample. An error of a factor of four costs a few percent for 200 requests."""

    request_s: float = 0.010
    tokens_per_s: float = 8000.0
    quadratic_tokens: float = 32000.0  # attention doubles the time of a token at this depth

    @property
    def scale(self) -> tuple[float, float, float]:
        """Seconds for one unit of each feature."""
        return (self.request_s, 1 / self.tokens_per_s, 1 / (self.tokens_per_s * self.quadratic_tokens))


@dataclass(frozen=True, slots=True)
class SpeedEstimates:
    """The present belief, for status and metrics. `slowness` is relative to the pool: 2 is half as fast."""

    request_s: float
    tokens_per_s: float
    quadratic_tokens: float
    onboarding_s_per_token: Mapping[Tier, float]  # by tier with at least one load
    onboarding_of: Mapping[EndpointId, Mapping[Tier, float]]  # the same by endpoint, against the pool's speed
    learning: bool  # no sample yet: the figures above are the priors
    samples: int
    samples_by_kind: Mapping[str, int]  # `streamed`: first tokens seen; `scraped`: the engines' own counters
    requests_without_sample: int  # placed since the latest sample
    slowness: Mapping[EndpointId, float]


class _Factor(msgspec.Struct, eq=False):
    log: float  # before the model's recentring
    samples: int
    at: float


class SpeedModel:
    """Learned prefill speeds of one pool of endpoints that serve the same model."""

    def __init__(
        self,
        priors: SpeedPriors = SpeedPriors(),
        *,
        decay: float = 0.995,
        ridge: float = 0.3,
        gain: float = 0.1,
        clip: float = 3.0,
        half_life_s: float = 120.0,
        max_endpoints: int = 4096,
    ) -> None:
        self._scale = priors.scale
        self._theta = 1.0, 1.0, 1.0
        self._gram = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0  # symmetric: its upper half, row by row
        self._moment = 0.0, 0.0, 0.0
        self._decay = decay
        self._ridge = ridge
        self._gain = gain
        self._clip = clip
        self._half_life_s = half_life_s
        self._max_endpoints = max_endpoints
        self._factors: dict[EndpointId, _Factor] = {}  # a dict: each decision reads one entry per endpoint
        self._logs = 0.0  # their sum
        self._recentred = 0.0  # total removed from every one of them so far
        self.onboarding = OnboardingCosts(max_endpoints=max_endpoints)
        self._samples = 0
        self._scraped = 0  # samples from scrapes
        self.requests_without_sample = 0  # counted at placement
        self.seconds: Features = (*self._scale, 1.0)  # pooled time of one unit of each feature

    @property
    def learning(self) -> bool:
        """No sample yet: what is trusted is what is assumed before the first."""
        return not self._samples

    def slowness(self, endpoint: EndpointId, now: float) -> float:
        """Factor on the pool's seconds; falls back towards 1 while no sample comes."""
        factor = self._factors.get(endpoint)
        if factor is None:
            return 1.0
        return math.exp((factor.log - self._recentred) * 0.5 ** ((now - factor.at) / self._half_life_s))

    def slowness_of_all(self, endpoints: Sequence[EndpointId], now: float) -> list[float]:
        """`slowness` of each."""
        factors = self._factors
        recentred = self._recentred
        half_life_s = self._half_life_s
        found = []
        for endpoint in endpoints:
            factor = factors.get(endpoint)
            if factor is None:
                found.append(1.0)
            else:
                found.append(math.exp((factor.log - recentred) * 0.5 ** ((now - factor.at) / half_life_s)))
        return found

    def onboarding_s(self, endpoint: EndpointId, lower: LowerTokens) -> float:
        """Pooled seconds to bring these up there."""
        return self.onboarding.onboarding_s(endpoint, lower, self.seconds[1])

    def observe(
        self,
        endpoint: EndpointId,
        work: Features,
        busy_s: float,
        now: float,
        *,
        lower: LowerTokens = (),
        scraped: bool = False,
    ) -> None:
        """Learns that `endpoint` did `work`, and brought `lower` up for it, in `busy_s` seconds."""
        if busy_s <= 0.0 or work[0] <= 0.0:
            return
        factor = self.slowness(endpoint, now)
        requests, tokens, attention, _ = work
        request_s, token_s, attention_s, _ = self.seconds
        predicted_s = requests * request_s + tokens * token_s + attention * attention_s
        onboarding_s = work[3]
        if lower:
            self.onboarding.observe(endpoint, lower, busy_s / factor - predicted_s, self.seconds[1])
            onboarding_s = self.onboarding_s(endpoint, lower)
        own_s = max(busy_s - factor * onboarding_s, 0.1 * busy_s)
        self._fit(work, own_s / factor, predicted_s)
        self._samples += 1
        self._scraped += scraped
        self.requests_without_sample = 0
        request_s, token_s, attention_s, _ = self.seconds
        fitted_s = requests * request_s + tokens * token_s + attention * attention_s
        self._move_factor(endpoint, factor, max(1e-4, own_s) / fitted_s, now)

    def forget(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left the pool."""
        self._take_out(endpoint)
        self.onboarding.forget(endpoint)

    def estimates(self, now: float) -> SpeedEstimates:
        """Return what is trusted now."""
        request_s, token_s, attention_s, _ = self.seconds
        return SpeedEstimates(
            request_s=request_s,
            tokens_per_s=1 / token_s,
            quadratic_tokens=token_s / attention_s,
            onboarding_s_per_token=self.onboarding.pool_prices(token_s),
            onboarding_of=self.onboarding.known(token_s),
            learning=self.learning,
            samples=self._samples,
            samples_by_kind={"streamed": self._samples - self._scraped, "scraped": self._scraped},
            requests_without_sample=self.requests_without_sample,
            slowness={endpoint: self.slowness(endpoint, now) for endpoint in self._factors},
        )

    def state(self, now: float) -> SpeedState:
        """Return the learned estimates for the saved state."""
        factors = {
            str(name): FactorState(one.log - self._recentred, one.samples, now - one.at)
            for name, one in self._factors.items()
        }
        a, p, q, b, r, c = self._gram
        onboarding = self.onboarding.sums
        return SpeedState(
            self._scale,
            self._theta,
            (a, p, q, p, b, r, q, r, c),
            self._moment,
            onboarding,
            self._samples,
            factors,
            self._scraped,
        )

    def resume(self, state: SpeedState, now: float, *, keep: Container[str], away_s: float) -> None:
        """Go on from what was learned `away_s` seconds ago, of these endpoints only. ValueError for what cannot be."""
        checked(state, scale=self._scale)
        t, u, v = state.theta
        self._theta = t, u, v
        x, y, z = state.moment
        self._moment = x, y, z
        a, p, q, _, b, r, _, _, c = state.gram
        self._gram = a, p, q, b, r, c
        self.onboarding.resume(state.onboarding, keep=keep)
        self._samples = state.samples
        self._scraped = state.scraped
        for name, one in state.factors.items():
            if name in keep and len(self._factors) < self._max_endpoints:
                log = max(-_LOG_BOUND, min(_LOG_BOUND, one.log)) + self._recentred
                self._take_out(EndpointId(name))
                self._factors[EndpointId(name)] = _Factor(log, one.samples, now - away_s - one.age_s)
                self._logs += log
        x, y, z = self._scale
        self.seconds = (t * x, u * y, v * z, 1.0)

    def _fit(self, work: Features, pooled_s: float, predicted_s: float) -> None:
        """One decayed step of weighted least squares; relative errors count, a large sample no more than a small."""
        target_s = min(self._clip * predicted_s, max(predicted_s / self._clip, pooled_s))
        weight = 1.0 / (predicted_s * target_s)
        decay = self._decay
        request_s, token_s, attention_s = self._scale
        x = work[0] * request_s
        y = work[1] * token_s
        z = work[2] * attention_s
        t = weight * x
        u = weight * y
        v = weight * z
        a, p, q, b, r, c = self._gram
        # Written out for its three dimensions: it runs at every first token.
        a = decay * a + t * x
        p = decay * p + t * y
        q = decay * q + t * z
        b = decay * b + u * y
        r = decay * r + u * z
        c = decay * c + v * z
        self._gram = a, p, q, b, r, c
        x, y, z = self._moment
        x = decay * x + t * target_s
        y = decay * y + u * target_s
        z = decay * z + v * target_s
        self._moment = x, y, z
        # Ridge regression towards one common scale of the priors, by coordinate descent from the last solution.
        common = (x + y + z) / (a + b + c + 2.0 * (p + q + r))
        ridge = self._ridge / (common * common)
        pull = ridge * common
        low = common / _SCALE_BOUND
        high = _SCALE_BOUND * common
        x = x + pull
        y = y + pull
        z = z + pull
        a = a + ridge
        b = b + ridge
        c = c + ridge
        t, u, v = self._theta
        for _ in range(_SWEEPS):
            t = (x - p * u - q * v) / a
            t = low if t < low else high if t > high else t
            u = (y - p * t - r * v) / b
            u = low if u < low else high if u > high else u
            v = (z - q * t - r * u) / c
            v = low if v < low else high if v > high else v
        self._theta = t, u, v
        self.seconds = t * request_s, u * token_s, v * attention_s, 1.0

    def _move_factor(self, endpoint: EndpointId, factor: float, ratio: float, now: float) -> None:
        """One step of the endpoint's log factor towards this sample's `ratio`, faster while it is new."""
        known = self._factors.pop(endpoint, None)
        samples = 0
        if known is not None:
            samples = known.samples
            self._logs -= known.log
        log = math.log(factor)
        residual = max(-1.0, min(1.0, math.log(ratio) - log))
        log += max(self._gain, 1 / (samples + 6)) * residual
        if known is None and len(self._factors) >= self._max_endpoints:
            self._take_out(next(iter(self._factors)))  # the endpoint without a sample for longest
        log = max(-_LOG_BOUND, min(_LOG_BOUND, log))
        log += self._recentred
        self._factors[endpoint] = _Factor(log, samples + 1, now)
        self._logs += log
        self._recentred += _RECENTRE * (self._logs / len(self._factors) - self._recentred)

    def _take_out(self, endpoint: EndpointId) -> _Factor | None:
        factor = self._factors.pop(endpoint, None)
        if factor is not None:
            self._logs -= factor.log
        return factor


class FactorState(msgspec.Struct, array_like=True, frozen=True):
    """One endpoint's log factor against the pool."""

    log: float
    samples: int
    age_s: float  # of its last sample


class SpeedState(msgspec.Struct, array_like=True, frozen=True):
    """Coefficients are relative to `scale` (seconds for one unit of each feature)."""

    scale: tuple[float, float, float]
    theta: tuple[float, ...]
    gram: tuple[float, ...]  # row by row
    moment: tuple[float, ...]
    onboarding: OnboardingSums
    samples: int
    factors: dict[str, FactorState]
    scraped: int = 0  # of the samples


def checked(state: SpeedState, *, scale: tuple[float, float, float]) -> None:
    """Raise ValueError for a state no model of this scale could have been in."""
    if state.scale != scale:
        raise ValueError("learned from other priors")
    if (len(state.theta), len(state.gram), len(state.moment)) != (3, 9, 3):
        raise ValueError("of another shape")
    onboarding = [number for sums in state.onboarding.values() for pair in sums.values() for number in pair]
    numbers = (*state.theta, *state.gram, *state.moment, *onboarding)
    logs = (value for one in state.factors.values() for value in (one.log, one.age_s))
    if not all(map(math.isfinite, (*numbers, *logs))):
        raise ValueError("not finite")
    if min(state.theta) <= 0 or min(*state.gram, *state.moment, *onboarding) < 0:
        raise ValueError("a negative time")
    if state.samples and min(state.gram[0], sum(state.moment)) <= 0:
        raise ValueError("samples without weight")
