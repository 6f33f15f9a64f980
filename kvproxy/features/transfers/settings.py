"""Settings of transfers."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.cache.settings import KvCacheSettings, has_store
from kvproxy.operate.config.schema import Config, find_filters


class TransferSettings(Model):
    """Copying KV to where it will be needed: from a shared store into an instance's memory (LMCache's coordinator), or
    from one instance to another (its controller, where the engines have P2P). Needs `lmcache_endpoint`."""

    retired = {
        "ahead": "turns took 1.04 of the time without copies ahead of them; `on_demand` copies where it helps",
        "at_once": "2 transfers at once are under way; `tokens_per_second` is their budget",
        "timeout": "a transfer that is not over after 2 s, or a longer `max_wait`, has failed",
    }

    on_demand: bool = False
    """To where a request goes, as part of the decision. Needs a cluster with `queue`."""
    max_wait: Duration = Field(default=2.0, gt=0, le=60)
    """On demand: upper bound of a request's wait for its copy, which is never longer than the expected saving."""
    tokens_per_second: int = Field(default=50_000, ge=1)
    """Budget of all instances together; 8,192 are 1 GB/s where a token's KV is 128 KiB."""
    min_tokens: int = Field(default=1024, ge=1)
    """Fewer tokens are not worth a transfer."""


class TransferPlace(Model):
    """The section that the `kvcache` filter gets."""

    transfers: TransferSettings = TransferSettings()
    """KV copied to where it will be needed."""


def verify(config: Config) -> Iterator[Finding]:
    """Refuse copies that nothing could make or wait for."""
    for at, settings in find_filters(config, KvCacheSettings):
        own = part_of(settings, TransferPlace).transfers
        if not settings.enabled:
            continue
        where = (*at, "transfers", "on_demand")
        if own.on_demand and not has_store(settings):
            yield error_at(where, "needs lmcache_endpoint, which moves KV", follows=((*at, "lmcache_endpoint"),))
        if own.on_demand and not any(one.queues for one in config.clusters.values()):
            why = "no cluster has a queue, without which nothing is copied on demand"
            yield error_at(where, why, "leave `queue: {enabled: false}` out of a cluster with kv_aware")
        if "max_wait" in own.model_fields_set and not own.on_demand:
            yield warning_at((*at, "transfers", "max_wait"), "does nothing without on_demand")


SETTINGS = FeatureSettings(fields={KvCacheSettings: (TransferPlace,)}, verify=verify)
