"""What an engine's own count of reused tokens says about what was predicted."""

from __future__ import annotations

from kvproxy.balancing.policy import FactSource
from kvproxy.kvcache.gathered import Gathered, Result
from kvproxy.kvcache.lookup import Lookups
from kvproxy.kvcache.ratio import BytesPerToken
from kvproxy.kvcache.selfcheck import EmptyLookups
from kvproxy.metrics.catalog import Metrics
from kvproxy.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.types import EndpointId


def tolerance_tokens(predicted_tokens: int) -> int:
    """How far reuse may stay behind a prediction before it contradicts it.

    Engines reuse whole blocks and always compute the last one; lengths in bytes only estimate tokens.
    """
    return min(predicted_tokens // 2, 64) + predicted_tokens // 8


class Learning:
    """Settles what was promised about a request, corrects the sources, and keeps the score by source."""

    def __init__(self, *, ratios: BytesPerToken, lookups: Lookups, metrics: Metrics) -> None:
        self._ratios = ratios
        self._lookups = lookups
        self._empty = EmptyLookups()
        self._metrics = metrics
        self._scores: dict[FactSource, _Score] = {}

    def finished(self, gathered: Gathered, result: Result) -> None:
        """The request is over, however it went. Once a request."""
        cached = result.cached_tokens if result.prefilled else None
        if result.endpoint is not None and cached is not None:
            self._compare(gathered, result.endpoint, cached)
            if gathered.holders_named is not None:
                ever_hit = self._lookups.hits > 0
                self._empty.observe(cached_tokens=cached, holders_named=gathered.holders_named, ever_hit=ever_hit)
        claim, gathered.claim = gathered.claim, None
        if claim is not None:
            gathered.local.settle(claim, prefilled=result.prefilled)
        elif result.endpoint is not None and result.prefilled:  # routed by somebody else
            gathered.local.approximate.insert(result.endpoint, gathered.hashes)
        if result.prompt_tokens is not None and result.prefilled:
            self._ratios.observe(gathered.model, gathered.prompt_bytes, result.prompt_tokens)

    def _compare(self, gathered: Gathered, endpoint: EndpointId, cached_tokens: int) -> None:
        """A contradicted prefix leaves the index at once; believing it longer would send more requests astray."""
        overlap = gathered.facts.by_endpoint.get(endpoint)
        predicted = gathered.facts.matched_tokens(endpoint)
        if overlap is None:
            return
        if overlap.source is FactSource.PRECISE:
            gathered.local.trust.observe(endpoint, overlap.claimed_tokens, overlap.backed_tokens, cached_tokens)
        if not predicted:
            return
        contradicted = cached_tokens + tolerance_tokens(predicted) < predicted
        source = overlap.source
        self._count(source, predicted, cached_tokens, contradicted)
        if contradicted:
            bytes_per_token = self._ratios.of(gathered.model)
            cached_blocks = int(cached_tokens * bytes_per_token) // TEXT_BLOCK_BYTES
            gathered.local.approximate.contradict(endpoint, gathered.hashes, cached_blocks)
            self._lookups.contradicted(endpoint, gathered.hashes, cached_tokens)

    def _count(self, source: FactSource, predicted: int, cached: int, contradicted: bool) -> None:
        score = self._scores.get(source)
        if score is None:
            score = self._scores[source] = _Score(self._metrics, source)
        result = score.miss if cached == 0 else score.partial if contradicted else score.hit
        result.value += 1.0
        score.predicted.value += predicted
        score.reused.value += min(predicted, cached)


class _Score:
    """Kept children of one source."""

    def __init__(self, metrics: Metrics, source: FactSource) -> None:
        results = (metrics.kv_predictions.labels(source.value, result) for result in ("miss", "partial", "hit"))
        self.miss, self.partial, self.hit = results
        self.predicted = metrics.kv_predicted_tokens.labels(source.value)
        self.reused = metrics.kv_reused_tokens.labels(source.value)
