"""Settings of warming."""

from __future__ import annotations

from enum import StrEnum

from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.cache.settings import KvCacheSettings


class PrefixExport(StrEnum):
    """Form in which the admin listener lists hot prefixes."""

    OFF = "off"
    HASHES = "hashes"
    TOKENS = "tokens"  # from which the text can be made again


class WarmingSettings(Model):
    """Computing prompts at endpoints that lack them, by `kvproxy warm`."""

    retired = {
        **dict.fromkeys(
            ("enabled", "tokens_per_minute", "uses_per_replica"),
            "a fleet's first tokens took 0.99 of their time with automatic warming; `kvproxy warm` computes prompts",
        ),
        "max_requests": "an engine with more than eight requests is left alone",
    }

    export: PrefixExport = PrefixExport.OFF
    """Content of `GET /warm` for the hot prefixes: token ids, by which `kvproxy warm` computes them again after the
    engines' restart (and from which their text can be read), or hashes alone. Both keep token ids of hot prefixes in
    memory (64 MiB at most)."""


class WarmingPlace(Model):
    """The section that the `kvcache` filter gets."""

    warming: WarmingSettings = WarmingSettings()
    """Prompts computed before they come."""


SETTINGS = FeatureSettings(fields={KvCacheSettings: (WarmingPlace,)})
