"""Settings of warming."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from kvproxy.base.settings.model import Model


class PrefixExport(StrEnum):
    """Form in which the admin listener lists hot prefixes."""

    OFF = "off"
    HASHES = "hashes"
    TOKENS = "tokens"  # from which the text can be made again


class WarmingSettings(Model):
    """Computing hot prefixes at endpoints that lack them, while these have nothing else to do: after a restart, at a
    new endpoint, and where fewer hold one than its traffic is worth. Needs `kv_events`."""

    enabled: bool = False
    """Do it without being asked. Token ids of hot prefixes are then kept in memory (64 MiB at most), never text."""
    max_requests: int = Field(default=8, ge=0, le=10_000)
    """An engine that runs and holds more requests than this is left alone; also for `kvproxy warm`."""
    tokens_per_minute: int = Field(default=200_000, ge=1)
    """Budget of all endpoints together."""
    export: PrefixExport = PrefixExport.OFF
    """Content of `GET /warm` for the hot prefixes: token ids, by which `kvproxy warm` computes them again after the
    engines' restart (and from which their text can be read), or hashes alone."""
    uses_per_replica: int = Field(default=50, ge=1)
    """One more endpoint should hold a prefix for each so many uses within `hot_window`."""


class WarmingPlace(Model):
    """The section that the `kvcache` filter gets."""

    warming: WarmingSettings = WarmingSettings()
    """Hot prefixes at endpoints that lack them."""
