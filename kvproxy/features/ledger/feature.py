"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Duration, Model, Size
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.settings.paths import Finding
    from kvproxy.operate.receipts.recorder import RecorderTarget
    from kvproxy.operate.receipts.writer import WritingObserver


class LedgerPrice(Model):
    """Price of a million tokens of a model, in the operator's own unit."""

    model: str = "*"
    """As the client names it; a trailing `*` matches any rest. The first rule that matches counts."""
    uncached: float = Field(default=0.0, ge=0)
    """Prompt tokens that were computed."""
    cached: float = Field(default=0.0, ge=0)
    """Prompt tokens that the engine reports as cached."""
    output: float = Field(default=0.0, ge=0)
    """Tokens generated."""


class LedgerSettings(Model):
    """The ledger: one JSON line an answered request, with its tenant, model, tokens by kind, and price."""

    retired = {"max_queue": "100,000 entries may wait"}

    path: str = ""
    """File it is written to, one for each proxy; empty: none."""
    prices: tuple[LedgerPrice, ...] = ()
    """Prices of tokens; without a rule for its model an entry has no price."""
    bill_predicted: bool = False
    """Price cached tokens that kvproxy predicted and reported to clients (`cached_tokens: predicted` of `router`) as
    cached ones; else such prompts are priced as computed. Entries name them in either case."""
    period: Duration = Field(default=86_400.0, le=31 * 86_400.0)
    """A file holds no more than one of these, counted in UTC; 0: only its size ends it."""
    max_file: Size = Field(default=64 * 1024 * 1024, ge=4096)
    """A file that is full becomes `path`.1, and so on."""
    max_files: int = Field(default=62, ge=2, le=10_000)
    """Files kept, the present one included; the oldest goes first."""


class LedgerPlace(Model):
    """The section that a configuration gets."""

    ledger: LedgerSettings = LedgerSettings()
    """Tokens by tenant and model, to be billed; off unless it has a path."""


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
