"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.compose import part_of
from kvproxy.features.ledger.settings import LedgerPlace
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.settings.model import Model
    from kvproxy.base.settings.paths import Finding
    from kvproxy.operate.receipts.recorder import RecorderTarget
    from kvproxy.operate.receipts.writer import WritingObserver


class LedgerFeature(Feature):
    """Writes down tokens by tenant and model, to be billed."""

    name = "ledger"
    metric_group = "LedgerMetrics"
    settings = {Config: (LedgerPlace,)}
    read_at_start = ("ledger",)

    def verify(self, config: Config) -> Iterable[Finding]:
        """Refuse to bill predictions where the router makes none."""
        from kvproxy.base.settings.paths import error_at
        from kvproxy.proxy.filter_settings import CachedTokens, RouterSettings

        routers = [spec.settings for spec in config.filters if isinstance(spec.settings, RouterSettings)]
        predicts = any(settings.cached_tokens is CachedTokens.PREDICTED for settings in routers)
        if part_of(config, LedgerPlace).ledger.bill_predicted and not predicts:
            hint = "`router: {cached_tokens: predicted}`, or leave it out"
            yield error_at(("ledger", "bill_predicted"), "there are no predictions for answers", hint)

    def observe_requests(self, proxy: RecorderTarget, config: Config) -> Sequence[WritingObserver[Any]]:
        """Return the ledger, if it has a path."""
        from kvproxy.features.ledger.ledger import Ledger

        settings = part_of(config, LedgerPlace).ledger
        if not settings.path:
            return ()
        return (Ledger(settings, metrics=proxy.metrics, clock=proxy.clock, wall_clock=proxy.wall_clock),)

    def share_settings(self, config: Config, index: int, part: Callable[[int], int]) -> Mapping[str, Model]:
        """Return the section with a file of the worker's own."""
        from kvproxy.operate.receipts.files import worker_path

        settings = part_of(config, LedgerPlace).ledger
        own = {
            "path": str(worker_path(Path(settings.path), index)) if settings.path else "",
            "max_file": max(4096, part(settings.max_file)),
        }
        return {"ledger": settings.model_copy(update=own)}


FEATURE = LedgerFeature()
