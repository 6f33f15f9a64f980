"""Settings of transfers."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model


class TransferSettings(Model):
    """Copying KV to where it will be needed: from a shared store into an instance's memory (LMCache's coordinator), or
    from one instance to another (its controller, where the engines have P2P). Needs `lmcache_endpoint`."""

    retired = {"ahead": "turns took 1.04 of the time without copies ahead of them; `on_demand` copies where it helps"}

    on_demand: bool = False
    """To where a request goes: while the router queue holds it or, with `max_wait`, as part of the decision. Needs a
    cluster with `queue`."""
    max_wait: Duration = Field(default=0.0, ge=0, le=60)
    """On demand: upper bound of a request's wait for its copy, which is never longer than the expected saving; 0: no
    wait."""
    at_once: int = Field(default=2, ge=1, le=64)
    """Transfers under way at once, over all instances; further ones are not made."""
    tokens_per_second: int = Field(default=50_000, ge=1)
    """Budget of all instances together; 8,192 are 1 GB/s where a token's KV is 128 KiB."""
    timeout: Duration = 2.0
    """A transfer that is not over by then has failed."""
    min_tokens: int = Field(default=1024, ge=1)
    """Fewer tokens are not worth a transfer."""


class TransferPlace(Model):
    """The section that the `kvcache` filter gets."""

    transfers: TransferSettings = TransferSettings()
    """KV copied to where it will be needed."""
