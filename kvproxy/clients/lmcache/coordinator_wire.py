"""What LMCache's coordinator answers, besides directory lookups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Which cache entries a prompt's tokens stand for."""

    model: str
    cache_salt: str = ""
    world_size: int = 1  # tensor-parallel ranks


@dataclass(frozen=True, slots=True)
class Instance:
    """A registered MP server."""

    instance_id: str
    ip: str
    http_port: int
    registration_time: float = 0.0  # the coordinator's wall clock
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryModule:
    """One compartment of memory."""

    tier: str
    backend: str
    used_bytes: int
    capacity_bytes: int
    usage_ratio: float | None = None  # None: no capacity declared
    shared: bool = False


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """Memory of one instance: a real pressure signal."""

    instance_id: str
    registered: bool
    declared_capacity: bool
    modules: tuple[MemoryModule, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetUsage:
    """Memory of every instance, and of pools they share."""

    instances: tuple[InstanceUsage, ...] = ()
    shared_modules: tuple[MemoryModule, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What a pin, unpin or delete did. `requested` counts chunks, `affected` keys: 0 means no effect."""

    status: str
    requested: int = 0
    affected: int = 0
    skipped: int = 0  # refused because locked or pinned


@dataclass(frozen=True, slots=True)
class Pins:
    """How many keys are pinned and how often, on the asked page."""

    total: int
    pin_counts: Mapping[str, int]  # chunk hash -> pins


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A submitted warm-up; `request_id` is empty when there was nothing to do (`noop`)."""

    instance_id: str
    status: str
    request_id: str = ""
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchStatus:
    """Progress of a warm-up: `pending`, then `completed` once; after that the job is unknown."""

    status: str
    found_keys: int | None = None
    total_keys: int | None = None


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """The directory in numbers."""

    num_keys: int
    num_placements: int
    l1_keys_by_instance: Mapping[str, int]
    l1_size_bytes: int = 0
    l2_size_bytes: int = 0


class WireInstances(msgspec.Struct):
    instances: list[Instance]


class WirePinKey(msgspec.Struct):
    chunk_hash_hex: str


class WirePinRow(msgspec.Struct):
    key: WirePinKey
    pin_count: int = 0


class WirePins(msgspec.Struct):
    total: int = 0
    pins: list[WirePinRow] = []


class WireHealth(msgspec.Struct):
    status: str
