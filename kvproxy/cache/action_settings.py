"""Settings of what the `kvcache` filter does about caches: pin, compress, evict."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from kvproxy.base.settings.model import Duration, Fraction, Model


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


class ScoreWeights(Model):
    """Weights of the order in which prefixes are evicted when KV memory is short. Only their ratios matter."""

    frequency: float = Field(default=0.5, ge=0)
    """Few uses within `hot_window`."""
    size: float = Field(default=0.3, ge=0)
    """Many tokens."""
    recency: float = Field(default=0.2, ge=0)
    """Long not used."""
    next_use: float = Field(default=0.5, ge=0)
    """Its next use is far away, by the time between those it had."""


class CacheStrategySettings(Model):
    """Actions on cached prefixes after a response. Each is off unless enabled."""

    enable_pinning: bool = False
    """Pin prefixes that are hot."""
    enable_compression: bool = False
    """Compress cold prefixes while the load is high."""
    enable_eviction: bool = False
    """Evict the coldest prefixes while KV memory is short."""
    dry_run: bool = False
    """Decide, log and count every action without sending it."""
    load_source: SignalSource = SignalSource.ENGINE
    """Load is the busier of running/waiting requests at the engine, or this host's CPU."""
    load_threshold: Fraction = 0.8
    """Load from which cold prefixes are compressed."""
    memory_source: SignalSource = SignalSource.ENGINE
    """Memory is the engine's KV cache usage, or this host's memory."""
    memory_threshold: Fraction = 0.9
    """Memory use from which cold prefixes are evicted."""
    memory_hysteresis: Fraction = 0.1
    """Once begun, eviction goes on until memory use is this much below `memory_threshold`."""
    evict_batch: int = Field(default=4, ge=1, le=64)
    """Prefixes evicted, or compressed, after one response; memory is read again before the next ones."""
    score_weights: ScoreWeights = ScoreWeights()
    """Order in which cold prefixes are evicted."""
    keep_prefixes: tuple[PrefixName, ...] = Field(default=(), max_length=1024)
    """Prefixes that are neither evicted nor compressed, by the name that the audit log gives them (16 hex digits)."""
    hot_content_threshold: int = Field(default=5, ge=1)
    """A prefix seen this often within `hot_window` is hot."""
    pin_instance_id: str = ""
    """LMCache instance that pins; empty: the one that served or holds the prefix."""
    pin_location: str = "LocalCPUBackend"
    """Storage location the pin applies to."""
    pin_lease: Duration = 300.0
    """How long the provider honours a pin (LMCache's default is about 300 s)."""
    pin_renewal: Duration = 240.0
    """A pin of a prefix that is still hot is renewed after this long; shorter than `pin_lease`."""
    pin_max_tokens: int = Field(default=200_000, ge=0)
    """Tokens pinned at once on one instance; 0 pins nothing."""
    compress_instance_id: str = ""
    """LMCache instance that compresses; empty: the one that served or holds the prefix."""
    compress_location: str = "LocalCPUBackend"
    """Storage location whose entries are compressed."""
    compress_min_tokens: int = Field(default=2048, ge=0)
    """Shorter prefixes are not compressed: little would be won, and to use them again they are decompressed."""
    compress_method: str = "cachegen"
    """Compression method; LMCache supports `cachegen` only and ignores others."""
    evict_instance_id: str = ""
    """LMCache instance that evicts; empty: the one short of memory."""
    evict_location: str = "LocalCPUBackend"
    """Storage location that is evicted from."""
    allow_clear: bool = False
    """Where the provider cannot evict one prefix (LMCache's controller), clear the whole location instead."""
    disable_after: int = Field(default=5, ge=1)
    """An action without effect this many times in a row on one instance switches itself off there."""
