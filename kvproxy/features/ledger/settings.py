"""Settings of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model, Size
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.config.schema import Config, find_filters
from kvproxy.proxy.filter_settings import RouterSettings
from kvproxy.proxy.settings import ServingSettings


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

    retired = {"max_queue": "100,000 entries may wait", "period": "a file ends with the day, in UTC"}

    path: str = ""
    """File it is written to, one for each proxy; empty: none."""
    prices: tuple[LedgerPrice, ...] = ()
    """Prices of tokens; without a rule for its model an entry has no price."""
    bill_predicted: bool = False
    """Price cached tokens that kvproxy predicted and reported to clients (`cached_tokens: predicted` of `router`) as
    cached ones; else such prompts are priced as computed. Entries name them in either case."""
    max_file: Size = Field(default=64 * 1024 * 1024, ge=4096)
    """A file that is full, or of an earlier day (UTC), becomes `path`.1, and so on."""
    max_files: int = Field(default=62, ge=2, le=10_000)
    """Files kept, the present one included; the oldest goes first."""


class CachedTokens(StrEnum):
    """Count of cached tokens that clients get if the engine's usage lacks it in the format of their API."""

    OFF = "off"
    ENGINE = "engine"
    PREDICTED = "predicted"  # also kvproxy's prediction if the engine reports none


class CachedTokensPlace(Model):
    """The setting that the filter `router` gets."""

    cached_tokens: CachedTokens = CachedTokens.OFF
    """Writes the count of cached tokens into an answer's usage where the client's API has a place for it and the engine
    left it empty: `engine`: if the engine reports it elsewhere in the answer; `predicted`: otherwise
    kvproxy's own prediction. Answers that are longer than 1 MiB and not streamed stay as they are."""


class LedgerPlace(Model):
    """The section that a configuration gets."""

    ledger: LedgerSettings = LedgerSettings()
    """Tokens by tenant and model, to be billed; off unless it has a path."""


def predicts_counts(config: ServingSettings) -> bool:
    """Return whether clients get predictions."""
    routers = [spec.settings for spec in config.filters if isinstance(spec.settings, RouterSettings)]
    return any(part_of(one, CachedTokensPlace).cached_tokens is CachedTokens.PREDICTED for one in routers)


def verify(config: Config) -> Iterable[Finding]:
    """Refuse predictions without the filter that makes them, and a ledger of predictions without these."""
    predicts = predicts_counts(config)
    if predicts and not any(one.enabled for _, one in find_filters(config, KvCacheSettings)):
        at = next(at for at, _ in find_filters(config, RouterSettings))
        yield error_at((*at, "cached_tokens"), "`predicted` needs the filter kvcache: nothing else predicts")
    if part_of(config, LedgerPlace).ledger.bill_predicted and not predicts:
        hint = "`router: {cached_tokens: predicted}`, or leave it out"
        yield error_at(("ledger", "bill_predicted"), "there are no predictions for answers", hint)


def share_settings(config: Config, index: int, part: Callable[[int], int]) -> Mapping[str, Model]:
    """Return the section with a file of the worker's own."""
    from kvproxy.operate.receipts.files import worker_path

    settings = part_of(config, LedgerPlace).ledger
    own = {
        "path": str(worker_path(Path(settings.path), index)) if settings.path else "",
        "max_file": max(4096, part(settings.max_file)),
    }
    return {"ledger": settings.model_copy(update=own)}


SETTINGS = FeatureSettings(
    fields={Config: (LedgerPlace,), RouterSettings: (CachedTokensPlace,)},
    read_at_start=("ledger",),
    verify=verify,
    share=share_settings,
)
