"""Cost of loading KV from a lower tier, learned by tier and endpoint from first tokens.

Seconds a token, as decayed ratios of sums. An endpoint's price starts from the pool's for that tier, and the pool's
from a weight: the share of computing a token that having it there saves. A price four times too high costs several
times what one four times too low does. So no sample counts for more than twice the present price, since a much longer
load usually means that the data was not there, and the cost of a token is capped at the cost of computing it."""

from __future__ import annotations

from collections.abc import Container, Mapping

from kvproxy.base.types import EndpointId, LowerTokens, Tier

#: Share of computing a token that a cached one saves, until loading from its tier was measured. Too low a weight costs
#: more than too high a one.
TIER_WEIGHTS = {Tier.PINNED: 0.75, Tier.HOST: 0.75, Tier.DISK: 0.25, Tier.SHARED: 0.75}
#: Weight of a price's starting value, in tokens.
PRIOR_TOKENS = 32_768.0
_DECAY = 0.99  # of a sum, per sample
_GROWTH = 2.0  # bound on one sample, in present prices...
_LEAST_SHARE = 0.02  # ...or in computing costs, so that a price of zero can grow

#: Seconds and tokens by tier; those of the pool under "".
OnboardingSums = dict[str, dict[Tier, tuple[float, float]]]
_POOL = EndpointId("")


class OnboardingCosts:
    """Load costs of one pool, in seconds of its average engine. `forget` an endpoint to release its memory."""

    def __init__(self, weights: Mapping[Tier, float] = TIER_WEIGHTS, *, max_endpoints: int = 4096) -> None:
        self.weights = weights
        self._max_endpoints = max_endpoints
        self._sums: dict[EndpointId, dict[Tier, tuple[float, float]]] = {_POOL: {}}

    def seconds_per_token(self, endpoint: EndpointId, tier: Tier, token_s: float) -> float:
        """Return the price there, where computing a token takes `token_s`."""
        price = self.pool_price(tier, token_s)
        sums = self._sums.get(endpoint)
        if sums is None or tier not in sums:
            return price
        seconds, tokens = sums[tier]
        return min(token_s, (seconds + PRIOR_TOKENS * price) / (tokens + PRIOR_TOKENS))

    def pool_price(self, tier: Tier, token_s: float) -> float:
        """Return the price on an endpoint of which nothing is known."""
        seconds, tokens = self._sums[_POOL].get(tier, (0.0, 0.0))
        prior_s = (1.0 - self.weights.get(tier, 1.0)) * token_s
        return min(token_s, (seconds + PRIOR_TOKENS * prior_s) / (tokens + PRIOR_TOKENS))

    def onboarding_s(self, endpoint: EndpointId, lower: LowerTokens, token_s: float) -> float:
        """To bring these up there."""
        return sum([tokens * self.seconds_per_token(endpoint, tier, token_s) for tier, tokens in lower])

    def observe(self, endpoint: EndpointId, lower: LowerTokens, extra_s: float, token_s: float) -> None:
        """Learn from a sample that took `extra_s` longer than its prefill and loaded these tokens."""
        prices = {tier: self.seconds_per_token(endpoint, tier, token_s) for tier, _ in lower}
        least = _LEAST_SHARE * token_s
        most_s = sum([tokens * max(_GROWTH * prices[tier], least) for tier, tokens in lower])
        if most_s <= 0.0:
            return
        share = max(0.0, min(1.0, extra_s / most_s))
        for tier, tokens in lower:
            seconds = share * tokens * max(_GROWTH * prices[tier], least)
            for name in (_POOL, endpoint):
                self._add(name, tier, seconds, tokens)

    def known(self, token_s: float) -> dict[EndpointId, dict[Tier, float]]:
        """Prices that were measured, by endpoint."""
        return {
            endpoint: {tier: self.seconds_per_token(endpoint, tier, token_s) for tier in sums}
            for endpoint, sums in self._sums.items()
            if endpoint != _POOL
        }

    def pool_prices(self, token_s: float) -> dict[Tier, float]:
        """Return the pool's prices, of tiers with at least one load."""
        return {tier: self.pool_price(tier, token_s) for tier in self._sums[_POOL]}

    def forget(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left."""
        self._sums.pop(endpoint, None)

    @property
    def sums(self) -> OnboardingSums:
        """Sums behind the prices, for the saved state."""
        return {str(name): dict(sums) for name, sums in self._sums.items()}

    def resume(self, sums: Mapping[str, Mapping[Tier, tuple[float, float]]], *, keep: Container[str]) -> None:
        """Go on from an earlier life's `sums`, of the pool and of these endpoints."""
        for name, own in sums.items():
            if not name or (name in keep and len(self._sums) <= self._max_endpoints):
                self._sums[EndpointId(name)] = dict(own)

    def _add(self, name: EndpointId, tier: Tier, seconds: float, tokens: float) -> None:
        sums = self._sums.get(name)
        if sums is None:
            if len(self._sums) > self._max_endpoints:
                return
            sums = self._sums[name] = {}
        before_s, before = sums.get(tier, (0.0, 0.0))
        sums[tier] = (_DECAY * before_s + seconds, _DECAY * before + tokens)
