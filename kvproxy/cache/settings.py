"""Settings of the `kvcache` filter: which endpoints hold a prompt's prefix, and what is done to keep it."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.base.settings.model import BreakerSettings, Duration, HeaderName, Model, Size
from kvproxy.cluster.settings import EventSources


class CacheStrategySettings(Model):
    """Actions on cached prefixes after a response. Each is off unless enabled."""

    hot_content_threshold: int = Field(default=5, ge=1, le=300)
    """A prefix seen this often within `hot_window` is hot."""


#: Parameters of signed URLs, lower case: S3 and stores with its API, Google Cloud Storage, CloudFront, Azure.
URL_SIGNATURES = (
    *("x-amz-*", "awsaccesskeyid"),
    *("x-goog-*", "googleaccessid"),
    *("signature", "expires", "key-pair-id", "policy"),
    *("sv", "se", "sr", "sp", "st", "spr", "sip", "sig", "skoid", "sktid", "skt", "ske", "sks", "skv"),
)


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


#: Connections to LMCache, and as many to the engine that tokenizes.
MAX_CONNECTIONS = 64


class KvCacheSettings(Model):
    """Settings of `kvcache`: which endpoint holds most of the prompt already, and what keeps it there."""

    retired = {
        "learn_capacity": "cache sizes are always learned where KV events are not complete",
        "background": "1,024 jobs may wait, 4 run at once, each for 10 s at most",
        "hot_max_keys": "the uses of 100,000 prefixes are counted",
        "hot_max_records": "300 uses of a prefix are remembered",
        "tokenize": "prompts are tokenized before routing where KV events or LMCache need ids",
        "retry": "a background call is attempted three times, 0.1 s and 0.2 s apart at most",
        "max_connections": "64 connections lead to LMCache, and as many to `vllm_endpoint`",
    }

    enabled: bool = True
    """False: requests go straight on."""
    vllm_endpoint: str = ""
    """URL of the engine that tokenizes; empty: an endpoint that serves the model."""
    default_model: str = ""
    """Model of a body that names none."""
    request_timeout: Duration = 2.0
    """For one background call to LMCache or `/tokenize`."""
    min_matched_tokens: int = Field(default=1, ge=1)
    """A match of fewer tokens is no preference."""
    prefer: bool | None = None
    """Send requests to the largest match, past the policy. Unset: only with LMCache, and only where the policy
    does not weigh matches itself (kv_aware and its peers do)."""
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
    cache_strategy: CacheStrategySettings = CacheStrategySettings()
    """Pin, compress, evict."""
    circuit_breaker: BreakerSettings = BreakerSettings()
    """One breaker per operation (lookup, tokenize, pin, ...): background failures never stop lookups."""
    preference_header: HeaderName = ""
    """Request header to the engine that names the preferred endpoint; empty: none."""


def has_store(settings: KvCacheSettings) -> bool:
    """Return whether they name a store beside the engines, in which prompts are looked up."""
    return any(feature.has_store(settings) for feature in settings_of_features())
