"""Settings of the ledger: where it is written, and what tokens cost."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model, Size


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
