"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model
from kvproxy.features.ledger.settings import CachedTokens, CachedTokensPlace, LedgerPlace, predicts_counts
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup, Metrics
    from kvproxy.operate.receipts.writer import WritingObserver
    from kvproxy.operate.runtime.operated import AdminTarget
    from kvproxy.proxy.forward.relay import EditsAnswers
    from kvproxy.proxy.settings import ServingSettings


class LedgerFeature(Feature):
    """Writes down tokens by tenant and model, to be billed."""

    name = "ledger"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Return those of the ledger and of counts for clients."""
        from kvproxy.features.ledger.metrics import CachedCountMetrics, LedgerMetrics

        return (LedgerMetrics, CachedCountMetrics)

    def needs_facts(self, config: ServingSettings) -> bool:
        """Return whether clients get predictions."""
        return predicts_counts(config)

    def edit_answers(self, settings: Model, metrics: Metrics) -> EditsAnswers | None:
        """Return what writes counts of cached tokens; None while that is off."""
        mode = part_of(settings, CachedTokensPlace).cached_tokens
        if mode is CachedTokens.OFF:
            return None
        from kvproxy.features.ledger.cached_counts import CachedCounts

        return CachedCounts(mode is CachedTokens.PREDICTED, metrics)

    def observe_requests(self, proxy: AdminTarget, config: Config) -> Sequence[WritingObserver[Any]]:
        """Return the ledger, if it has a path."""
        from kvproxy.features.ledger.ledger import Ledger

        settings = part_of(config, LedgerPlace).ledger
        if not settings.path:
            return ()
        return (Ledger(settings, metrics=proxy.metrics, clock=proxy.clock, wall_clock=proxy.wall_clock),)


FEATURE = LedgerFeature()
