"""What an engine's own count of reused tokens says about what was predicted."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvproxy.kvcache.feedback.bytes_per_token import BytesPerToken
from kvproxy.kvcache.feedback.hit_ratios import HitRatioStats
from kvproxy.kvcache.feedback.prediction_stats import PredictionStats
from kvproxy.kvcache.feedback.selfcheck import EmptyLookups
from kvproxy.kvcache.overlap.facts import RequestFacts, Result
from kvproxy.kvcache.overlap.lookup import LookupClient
from kvproxy.metrics.catalog import Metrics
from kvproxy.prefix.approximate.endpoint_lru import SpeculativeEntry
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.types import Clock, EndpointId

log = logging.getLogger("kvproxy.kvcache")


class PredictionFeedback:
    """Settles what was promised about a request, corrects the sources, and keeps the score by endpoint and source.

    One that takes over from a `former` keeps its scores and accounts.
    """

    def __init__(
        self,
        *,
        ratios: BytesPerToken,
        lookups: LookupClient,
        metrics: Metrics,
        clock: Clock,
        former: PredictionFeedback | None = None,
    ) -> None:
        self._ratios = ratios
        self._lookups = lookups
        self._empty = EmptyLookups(clock=clock)
        self.scores: PredictionStats = PredictionStats(metrics, clock=clock) if former is None else former.scores
        self.accounts: HitRatioStats = HitRatioStats() if former is None else former.accounts
        metrics.kvcache.prediction_alarm.read(self.scores.alarm_series)
        metrics.holdings.endpoint_hit_ratio.read(self.accounts.hit_series)
        metrics.holdings.engine_foreign_ratio.read(self.accounts.foreign_series)

    def finished(self, gathered: RequestFacts, result: Result) -> None:
        """The request is over, however it went. Once a request."""
        local, endpoint = gathered.local, result.endpoint
        claim, gathered.claim = gathered.claim, None
        lost = False
        if result.prefilled and endpoint is not None:
            predicted = gathered.facts.matched_tokens(endpoint)
            cached = result.cached_tokens
            self.accounts.served(
                (gathered.cluster.name, endpoint),
                prompt_tokens=gathered.facts.prompt_tokens if result.prompt_tokens is None else result.prompt_tokens,
                cached_tokens=cached or 0,
                predicted_tokens=predicted,
            )
            if cached is not None:
                if claim is not None and claim.endpoint == endpoint and endpoint not in local.exact:
                    lost = self._size(gathered, claim, result, cached)
                self._compare(gathered, endpoint, result.request_id, predicted, cached)
        if claim is not None:
            local.settle(claim, prefilled=result.prefilled)
        if endpoint is not None and result.prefilled and (claim is None or lost):  # routed elsewhere
            local.approximate.insert(endpoint, gathered.cursor)
        if result.prompt_tokens is not None and result.prefilled:
            self._ratios.observe(gathered.model, gathered.prompt_bytes, result.prompt_tokens)

    def keep(self, present: Collection[tuple[str, EndpointId]]) -> None:
        """Forget all endpoints but these."""
        self.scores.keep(present)
        self.accounts.keep(present)

    def _size(self, gathered: RequestFacts, claim: SpeculativeEntry, result: Result, cached_tokens: int) -> bool:
        """What the response says about the room at its endpoint; True when it lost all that it held."""
        tokens = result.prompt_tokens
        bytes_per_token = gathered.prompt_bytes / tokens if tokens else self._ratios.of(gathered.model)
        lost = gathered.local.capacities.observe(claim, int(cached_tokens * bytes_per_token) // TEXT_BLOCK_BYTES)
        if lost:
            log.info(
                "[kvcache] %s/%s reuses nothing of what it was sent, not even what it was sent just now: forgotten "
                "(a restart, or its cache was cleared)",
                gathered.cluster.name,
                claim.endpoint,
            )
        return lost

    def _compare(
        self, gathered: RequestFacts, endpoint: EndpointId, request_id: str, predicted: int, cached_tokens: int
    ) -> None:
        """What was predicted against what the engine says: the sources are corrected and the score is kept."""
        local, overlap = gathered.local, gathered.facts.by_endpoint.get(endpoint)
        contradicted = local.correct(
            endpoint,
            gathered.cursor,
            overlap,
            predicted_tokens=predicted,
            cached_tokens=cached_tokens,
            cached_blocks=int(cached_tokens * self._ratios.of(gathered.model)) // TEXT_BLOCK_BYTES,
        )
        if gathered.holders_named is not None:
            ever_hit = self._lookups.hits > 0
            self._empty.observe(cached_tokens=cached_tokens, holders_named=gathered.holders_named, ever_hit=ever_hit)
        if overlap is None or not predicted:
            return
        self.scores.count(
            gathered.cluster.name,
            endpoint,
            overlap.source,
            predicted=predicted,
            cached=cached_tokens,
            contradicted=contradicted,
            request_id=request_id,
        )
        if contradicted:
            self._lookups.contradicted(endpoint, gathered.hashes, cached_tokens)
