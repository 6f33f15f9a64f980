"""Settings of the `kvcache` filter: which endpoints hold a prompt's prefix, and what is done to keep it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from kvproxy.base.settings.model import BreakerSettings, Duration, Fraction, HeaderName, Model, Size
from kvproxy.cluster.settings import EventSources


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


class CacheStrategySettings(Model):
    """Actions on cached prefixes after a response. Each is off unless enabled."""

    retired = {
        "score_weights": "the order of eviction is the measured one (benchmarks/reports/eviction.md)",
        "evict_batch": "4 prefixes go after each response",
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
    hot_content_threshold: int = Field(default=5, ge=1, le=300)
    """A prefix seen this often within `hot_window` is hot."""
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
    compress_min_tokens: int = Field(default=2048, ge=0)
    """Shorter prefixes are not compressed: little would be won, and to use them again they are decompressed."""
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


#: Parameters of signed URLs, lower case: S3 and stores with its API, Google Cloud Storage, CloudFront, Azure.
URL_SIGNATURES = (
    *("x-amz-*", "awsaccesskeyid"),
    *("x-goog-*", "googleaccessid"),
    *("signature", "expires", "key-pair-id", "policy"),
    *("sv", "se", "sr", "sp", "st", "spr", "sip", "sig", "skoid", "sktid", "skt", "ske", "sks", "skv"),
)


class Provider(StrEnum):
    """Kind of the LMCache service at `lmcache_endpoint`."""

    AUTO = "auto"
    CONTROLLER = "controller"
    COORDINATOR = "coordinator"


class TokenCacheSettings(Model):
    """Token memory: the ids of known message prefixes, so that a chat's next turn needs no tokenize call."""

    enabled: bool = True
    """Remember tokens at all; without it every lookup waits for `/tokenize`."""
    max_bytes: Size = 64 * 1024 * 1024
    """Memory for token ids; the least recently used prefix goes first."""
    max_size: int = Field(default=0, ge=0)
    """Most prefixes remembered; 0: `max_bytes` alone bounds them."""
    ttl: Duration = 3600.0
    """A prefix not used for this long is forgotten."""


class TokenizeSettings(Model):
    """Use of the engine's `/tokenize` before routing."""

    retired = {"max_concurrent": "64 prompts are tokenized at once, further ones are routed without"}

    inline: bool = True
    """Tokenize before routing, under `lookup_routing_timeout`; otherwise only afterwards, for the next turn."""
    inline_min: Size = 1024
    """Shorter prompts are tokenized afterwards: LMCache matches whole chunks only (256 tokens by default)."""


#: Connections to LMCache, and as many to the engine that tokenizes.
MAX_CONNECTIONS = 64


class KvCacheSettings(Model):
    """Settings of `kvcache`: which endpoint holds most of the prompt already, and what keeps it there."""

    retired = {
        "learn_capacity": "cache sizes are always learned where KV events are not complete",
        "background": "1,024 jobs may wait, 4 run at once, each for 10 s at most",
        "hot_max_keys": "the uses of 100,000 prefixes are counted",
        "hot_max_records": "300 uses of a prefix are remembered",
        "retry": "a background call is attempted three times, 0.1 s and 0.2 s apart at most",
        "max_connections": "64 connections lead to `lmcache_endpoint`, and as many to `vllm_endpoint`",
    }

    enabled: bool = True
    """False: requests go straight on."""
    lmcache_endpoint: str = ""
    """URL of LMCache's controller or coordinator; empty: no lookups and no actions."""
    provider: Provider = Provider.AUTO
    """Kind of service; `auto` queries it at start."""
    directory_model: str = ""
    """Model name in the coordinator's directory (vLLM's `--model`, not its served name); empty: the request's model."""
    vllm_endpoint: str = ""
    """URL of the engine that tokenizes; empty: an endpoint that serves the model."""
    default_model: str = ""
    """Model of a body that names none."""
    request_timeout: Duration = 2.0
    """For one background call to LMCache or `/tokenize`."""
    lookup_routing_timeout: Duration = 0.05
    """Upper bound on the delay of a request by tokenize and lookup together; later answers still train the memory."""
    min_matched_tokens: int = Field(default=1, ge=1)
    """A match of fewer tokens is no preference."""
    lookup_min_tokens: int = Field(default=256, ge=0)
    """Shorter prompts are not looked up: LMCache matches whole chunks only (256 tokens by default)."""
    prefer: bool | None = None
    """Send requests to the largest match, past the policy. Unset: only with `lmcache_endpoint`, and only where the
    policy does not weigh matches itself (kv_aware and its peers do)."""
    engine_metrics_interval: Duration = 5.0
    """How often each engine's `/metrics` is read (KV usage, queue, cache size), never for a request; 0: never."""
    url_signatures: tuple[str, ...] = URL_SIGNATURES
    """Parameters of URLs of pictures and other media that do not name the content: two URLs that differ in these alone
    are one picture. `*` at the end stands for any ending."""
    kv_event_sources: EventSources = EventSources()
    """Where older engines publish them."""
    hot_window: Duration = 300.0
    """How far back uses of a prefix count."""
    token_cache: TokenCacheSettings = TokenCacheSettings()
    """Token memory."""
    tokenize: TokenizeSettings = TokenizeSettings()
    """Asking the engine for token ids."""
    cache_strategy: CacheStrategySettings = CacheStrategySettings()
    """Pin, compress, evict."""
    circuit_breaker: BreakerSettings = BreakerSettings()
    """One breaker per operation (lookup, tokenize, pin, ...): background failures never stop lookups."""
    preference_header: HeaderName = ""
    """Request header to the engine that names the preferred endpoint; empty: none."""
