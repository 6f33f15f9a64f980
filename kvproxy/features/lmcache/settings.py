"""Settings of LMCache: its service, lookups there, and actions on prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Fraction
from kvproxy.base.settings.paths import Finding, Path, error_at, warning_at
from kvproxy.cache.settings import CacheStrategySettings, KvCacheSettings
from kvproxy.operate.config.schema import Config, find_filters


def _prefix_name(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError("must be the 16 hex digits by which the audit log names a prefix")
    return text


#: A prefix's key, as logs show it.
PrefixName = Annotated[str, AfterValidator(_prefix_name)]


class SignalSource(StrEnum):
    """Where a load or memory figure comes from."""

    ENGINE = "engine"
    HOST = "host"


class StrategySettings(CacheStrategySettings):
    """Actions on cached prefixes at LMCache after a response."""

    retired = {
        "score_weights": "the order of eviction is the measured one (benchmarks/reports/eviction.md)",
        "evict_batch": "4 prefixes go after each response",
        "compress_min_tokens": "prefixes of 2,048 tokens and more are compressed",
        "compress_method": "LMCache compresses with cachegen and ignores other methods",
        "memory_hysteresis": "eviction goes on until memory use is 0.1 below memory_threshold",
        "pin_renewal": "a pin is renewed after 0.8 of pin_lease",
        "disable_after": "5 actions in a row without effect switch it off at that instance",
    }

    enable_pinning: bool = False
    """Pin prefixes that are hot."""
    enable_compression: bool = False
    """Compress cold prefixes while the load is high."""
    enable_eviction: bool = False
    """Evict the coldest prefixes while KV memory is short."""
    dry_run: bool = False
    """Decide, log and count every action without sending it."""
    load_source: SignalSource = SignalSource.ENGINE
    """Load is the engine's (the larger of its running requests against 256 and the share of its requests that wait), or
    this host's processor use."""
    load_threshold: Fraction = 0.8
    """Load from which cold prefixes are compressed."""
    memory_source: SignalSource = SignalSource.ENGINE
    """Memory is the use of the engine's KV cache, or of this host's memory."""
    memory_threshold: Fraction = 0.9
    """Memory use from which cold prefixes are evicted, until it is 0.1 below."""
    keep_prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=1024)
    """Prefixes that are neither evicted nor compressed, by the name that the audit log gives them (16 hex digits)."""
    pin_instance_id: str = ""
    """LMCache instance that pins; empty: the one that served or holds the prefix."""
    pin_location: str = "LocalCPUBackend"
    """Storage location the pin applies to."""
    pin_lease: Duration = 300.0
    """How long the provider honours a pin (LMCache's default is about 300 s). A pin of a prefix that is still hot is
    renewed after 0.8 of it."""
    pin_max_tokens: int = Field(default=200_000, ge=0)
    """Tokens pinned at once on one instance; 0 pins nothing."""
    compress_instance_id: str = ""
    """LMCache instance that compresses; empty: the one that served or holds the prefix."""
    compress_location: str = "LocalCPUBackend"
    """Storage location whose entries are compressed."""
    evict_instance_id: str = ""
    """LMCache instance that evicts; empty: the one short of memory."""
    evict_location: str = "LocalCPUBackend"
    """Storage location that is evicted from."""
    allow_clear: bool = False
    """Where the provider cannot evict one prefix (LMCache's controller), clear the whole location instead."""

    @property
    def enabled(self) -> Sequence[str]:
        """Switches that are on."""
        switches = ("enable_pinning", "enable_compression", "enable_eviction")
        return [name for name in switches if getattr(self, name)]

    @property
    def pin_renewal_s(self) -> float:
        """Age at which a pin of a hot prefix is renewed."""
        return 0.8 * self.pin_lease


class ServiceKind(StrEnum):
    """Kind of the LMCache service at `lmcache_endpoint`."""

    AUTO = "auto"
    CONTROLLER = "controller"
    COORDINATOR = "coordinator"


class LMCacheSettings(KvCacheSettings):
    """Keys that the `kvcache` filter gets."""

    lmcache_endpoint: str = ""
    """URL of LMCache's controller or coordinator; empty: no lookups and no actions."""
    provider: ServiceKind = ServiceKind.AUTO
    """Kind of service; `auto` queries it at start."""
    directory_model: str = ""
    """Model name in the coordinator's directory (vLLM's `--model`, not its served name); empty: the request's model."""
    lookup_routing_timeout: Duration = 0.05
    """Upper bound on the delay of a request by tokenize and lookup together; later answers still train the memory."""
    lookup_min_tokens: int = Field(default=256, ge=0)
    """Shorter prompts are not looked up: LMCache matches whole chunks only (256 tokens by default)."""


def strategy_of(settings: KvCacheSettings) -> StrategySettings:
    """Return the settings of actions."""
    return part_of(settings.cache_strategy, StrategySettings)


def verify(config: Config) -> Iterator[Finding]:
    """Faults and doubts of what LMCache is asked for."""
    for at, settings in find_filters(config, KvCacheSettings):
        if settings.enabled:
            yield from _verify(part_of(settings, LMCacheSettings), at, config)


def _verify(settings: LMCacheSettings, at: Path, config: Config) -> Iterator[Finding]:
    url = settings.lmcache_endpoint
    if fault := url_fault(url) if url else "":
        yield error_at((*at, "lmcache_endpoint"), fault)
    strategy = strategy_of(settings)
    plan = (*at, "cache_strategy")
    if not url:
        for name in strategy.enabled:
            yield error_at((*plan, name), "needs lmcache_endpoint", follows=((*at, "lmcache_endpoint"),))
    if settings.lookup_routing_timeout > settings.request_timeout:
        longer = (
            f"{settings.lookup_routing_timeout:g} s is longer than request_timeout ({settings.request_timeout:g} s)"
        )
        hint = "a bare number is seconds: write 50ms for milliseconds" if settings.lookup_routing_timeout >= 10 else ""
        yield warning_at((*at, "lookup_routing_timeout"), f"{longer}, which then ends lookups first", hint)
    known = {e.instance_id or e.id for cluster in config.clusters.values() for e in cluster.endpoints}
    for name in ("pin_instance_id", "compress_instance_id", "evict_instance_id"):
        wanted = getattr(strategy, name)
        if wanted and wanted not in known:
            hint = f"instances: {', '.join(sorted(known))}"
            yield warning_at((*plan, name), f"no endpoint has the instance id {wanted!r}", hint)


def has_store(settings: KvCacheSettings) -> bool:
    return bool(part_of(settings, LMCacheSettings).lmcache_endpoint)


SETTINGS = FeatureSettings(
    fields={KvCacheSettings: (LMCacheSettings,), CacheStrategySettings: (StrategySettings,)},
    has_store=has_store,
    verify=verify,
)
