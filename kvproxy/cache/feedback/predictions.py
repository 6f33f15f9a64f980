"""Feedback from an engine's own count of reused tokens to the predictions."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, RequestKind
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.feedback.uncounted import UncountedPrompts
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.metrics import HoldingMetrics, KvCacheMetrics
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.last_served import NO_BLOCKS, NO_NAMES
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.state import CacheState
from kvproxy.cluster.routing.policy import Overlap

log = logging.getLogger("kvproxy.kvcache")

_LOST = (
    "[kvcache] %s/%s reuses none of its prompts, not even the latest: index cleared (a restart, or its cache was "
    "cleared)"
)


class PredictionFeedback:
    """Settles what was promised about a request, corrects the sources, and keeps the score by endpoint and source.

    The scores and hit ratios are the state's.
    """

    def __init__(self, *, state: CacheState, clock: Clock, rng: random.Random) -> None:
        self._state = state
        self.uncounted = UncountedPrompts(state.bytes_per_token, rng=rng)
        self._bytes_per_token = state.bytes_per_token
        self._clock = clock
        self.predictions = state.predictions
        self.hit_ratios = state.hit_ratios
        self._losses = state.losses

    def bind_gauges(self, metrics: Metrics) -> None:
        metrics.group(KvCacheMetrics).prediction_alarm.set_source(self.predictions.alarm_series)
        metrics.group(HoldingMetrics).endpoint_hit_ratio.set_source(self.hit_ratios.hit_series)
        metrics.group(HoldingMetrics).engine_foreign_ratio.set_source(self.hit_ratios.foreign_series)

    def finished(self, facts: RequestFacts, result: Result) -> None:
        """Learn from a finished request, whatever its end. Once per request."""
        indexes = facts.indexes
        endpoint = result.endpoint
        prefilled = result.prefilled
        entry = facts.entry
        facts.entry = None
        lost = False
        if prefilled and endpoint is not None:
            computed_at = endpoint if result.prefill_endpoint is None else result.prefill_endpoint
            lost = self._compare(facts, entry, computed_at, result)
        if entry is not None:
            ends = facts.request.session_ends
            indexes.settle_entry(entry, prefilled=prefilled, lost=lost, ends=ends, calls_tool=result.calls_tool)
        elif endpoint is not None and prefilled:  # it was routed by another than this proxy
            indexes.enter_prompt(endpoint, facts.cursor)
        if result.prompt_tokens is not None and prefilled and facts.request.continues is None:
            self._learn_count(facts, result.prompt_tokens, result.media_tokens)
        if prefilled and endpoint is not None and facts.names is not NO_NAMES and not facts.request.session_ends:
            said = result.prompt_tokens
            indexes.last_served.note_served(
                facts.names,
                response_id=result.response_id,
                endpoint=endpoint,
                prompt_tokens=facts.overlaps.prompt_tokens if said is None else said,
                answer_tokens=result.completion_tokens or 0,
                keys=facts.keys,
                root=facts.hashes if facts.request.kind is RequestKind.RESPONSES else NO_BLOCKS,
                now=self._clock(),
            )

    def keep_only(self, present: Collection[tuple[str, EndpointId]]) -> None:
        """Forget all endpoints but these."""
        self.predictions.keep_only(present)
        self.hit_ratios.keep_only(present)
        self._losses.keep_only(present)

    def _learn_count(self, facts: RequestFacts, prompt_tokens: int, media_tokens: int | None) -> None:
        """Learn from the engine's count of the prompt, and of its media if reported. Text alone teaches bytes per
        token; for media without a count of their own, the remainder without the text teaches theirs."""
        if facts.media:
            counts = self._state.media_counts
            if media_tokens is None:
                media_tokens = counts.find_count(facts.model, facts.media)
            if media_tokens is None:
                if facts.mixed is not None:
                    text_tokens = facts.overlaps.prompt_tokens - facts.mixed.media_tokens
                    counts.observe_estimate(facts.model, facts.media, prompt_tokens - text_tokens)
                return
            counts.observe_count(facts.model, facts.media, media_tokens)
            prompt_tokens -= media_tokens
        self._state.learn_count(facts.model, facts.keys, facts.text_bytes, prompt_tokens)

    def _compare(
        self, facts: RequestFacts, entry: SpeculativeEntry | None, endpoint: EndpointId, result: Result
    ) -> bool:
        """Compare the prediction with the report of the engine, correct the sources and keep the score. Return True
        when the engine lost all that it held."""
        overlap = facts.overlaps.by_endpoint.get(endpoint)
        cached = result.cached_tokens
        tokens = result.prompt_tokens
        predicted, held = (0, 0) if overlap is None else _expected_tokens(facts, overlap, tokens)
        self.hit_ratios.count_response(
            (facts.cluster.name, endpoint),
            prompt_tokens=facts.overlaps.prompt_tokens if tokens is None else tokens,
            cached_tokens=cached or 0,
            predicted_tokens=predicted,
        )
        if cached is None:
            return False
        cached_blocks = self._count_blocks(facts, cached, tokens)
        lost = False
        if entry is not None and entry.endpoint == endpoint:
            lost = facts.indexes.observe_capacity(entry, overlap, cached_tokens=cached, cached_blocks=cached_blocks)
            if lost:
                log.info(_LOST, facts.cluster.name, endpoint)
                self._losses.note_loss(facts.cluster.name, endpoint, LossReason.FORGOT)
        contradicted = facts.indexes.correct_prediction(
            endpoint,
            facts.cursor,
            overlap,
            predicted_tokens=predicted,
            held_tokens=held,
            cached_tokens=cached,
            cached_blocks=cached_blocks,
            known_tokens=facts.searched_tokens if facts.indexes.followed.any else 0,
        )
        if contradicted and facts.reported is not None:
            facts.indexes.followed.reported.forget(facts.keys, facts.hashes, facts.media, facts.model)
        if overlap is not None and predicted:
            self.predictions.count_prediction(
                facts.cluster.name,
                endpoint,
                overlap.source,
                predicted=predicted,
                cached=cached,
                contradicted=contradicted,
                request_id=result.request_id,
            )
            if contradicted:
                facts.indexes.denied.note_denial(endpoint, facts.hashes, cached, cached_blocks, overlap.lower)
        return lost

    def _count_blocks(self, facts: RequestFacts, cached_tokens: int, prompt_tokens: int | None) -> int:
        """Return the blocks of its text for these cached tokens."""
        if facts.mixed is not None:
            return min(facts.mixed.bytes_before(cached_tokens) // TEXT_BLOCK_BYTES, len(facts.hashes))
        history = facts.request.continues is not None
        counted = facts.prompt_bytes / prompt_tokens if prompt_tokens and not history else None
        blocks = int(cached_tokens * (counted or self._bytes_per_token.look_up(facts.model))) // TEXT_BLOCK_BYTES
        return min(blocks, len(facts.hashes)) if history else blocks


def _expected_tokens(facts: RequestFacts, overlap: Overlap, prompt_tokens: int | None) -> tuple[int, int]:
    """Return the reuse expected under this overlap, and the tokens assumed to be held, those in the engine's own
    tokens."""
    expected = facts.overlaps.prompt_tokens
    predicted = min(overlap.tokens if overlap.lower else overlap.device_tokens, expected)
    held = min(overlap.held_tokens, expected) or predicted
    return predicted, held * prompt_tokens // expected if prompt_tokens and expected else held
