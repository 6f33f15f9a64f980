"""Answers of LMCache's coordinator; a directory lookup reduced to contiguous prefixes per instance. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import msgspec

#: LMCache's default chunk; used when an answer leaves the real size open.
DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Leading tokens of one prompt that one instance can load, contiguous from the start."""

    tokens: int  # from memory, its own disk or pool, and pools every instance shares
    disk_tokens: int = 0  # of these, from its own disk or pool alone
    shared_tokens: int = 0  # from shared pools alone


@dataclass(frozen=True, slots=True)
class DirectoryLookup:
    """The holders of each chunk of one prompt: exact, all of them, for one model and salt."""

    chunks: int
    chunk_tokens: int
    holders: tuple[frozenset[str], ...]  # of each chunk: instances with every rank of it, on any tier of their own
    by_instance: Mapping[str, HeldPrefix]  # instances with at least one leading chunk
    shared_tokens: int  # leading tokens any instance can load from a shared pool


class _Key(msgspec.Struct):
    chunk_hash_hex: str
    kv_rank: int = 0


class _Placement(msgspec.Struct):
    instance_id: str
    tier: Literal["l1", "l2"]
    shared: bool = False


class _Result(msgspec.Struct):
    key: _Key
    placements: list[_Placement] = []
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")


class WireDirectory(msgspec.Struct):
    """`/directory/lookup`: one result a chunk and rank, in order."""

    chunks: int
    results: list[_Result] = []


@dataclass(slots=True)
class _Chunk:
    """Holders of one chunk: the instances that have every rank of it."""

    l1: set[str]
    own: set[str]
    shared: bool


def directory_lookup(answer: WireDirectory, *, prompt_tokens: int) -> DirectoryLookup:
    """`answer` for a prompt of `prompt_tokens` tokens."""
    chunks = _chunks(answer.results)
    chunk_tokens = _chunk_tokens(answer, prompt_tokens)
    shared = _leading(chunk.shared for chunk in chunks)
    named = {name for chunk in chunks for name in chunk.own}
    held = {name: _held(chunks, name, chunk_tokens) for name in named}
    return DirectoryLookup(
        chunks=answer.chunks,
        chunk_tokens=chunk_tokens,
        holders=tuple(frozenset(chunk.own) for chunk in chunks),
        by_instance={name: each for name, each in held.items() if each.tokens},
        shared_tokens=shared * chunk_tokens,
    )


def _chunks(results: Sequence[_Result]) -> list[_Chunk]:
    """Return the results of each chunk's ranks put together, in order. Hashes are chained: within one prompt none
    repeats."""
    chunks: dict[str, _Chunk] = {}
    for result in results:
        l1 = {p.instance_id for p in result.placements if p.tier == "l1" and not p.shared}
        own = {p.instance_id for p in result.placements if not p.shared}
        shared = any(p.shared for p in result.placements)
        known = chunks.get(result.key.chunk_hash_hex)
        if known is None:
            chunks[result.key.chunk_hash_hex] = _Chunk(l1, own, shared)
        else:
            known.l1 &= l1
            known.own &= own
            known.shared &= shared
    return list(chunks.values())


def _held(chunks: Sequence[_Chunk], name: str, size: int) -> HeldPrefix:
    count = _leading(chunk.shared or name in chunk.own for chunk in chunks)
    disk = sum(name in chunk.own - chunk.l1 for chunk in chunks[:count])
    shared = sum(name not in chunk.own for chunk in chunks[:count])
    return HeldPrefix(count * size, disk * size, shared * size)


def _leading(held: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, held))


def _chunk_tokens(answer: WireDirectory, prompt_tokens: int) -> int:
    """Return the tokens of a chunk: from a known chunk's ids, else bounded by how many whole chunks the prompt has."""
    told = next((commas for each in answer.results if (commas := bytes(each.token_ids).count(b","))), None)
    return chunk_tokens_of(answer.chunks, prompt_tokens) if told is None else told + 1


def chunk_tokens_of(chunks: int, prompt_tokens: int) -> int:
    """Return the tokens of a chunk, from a prompt and its number of whole chunks."""
    if chunks <= 0:
        return DEFAULT_CHUNK_TOKENS
    most = prompt_tokens // chunks
    least = prompt_tokens // (chunks + 1) + 1
    if least <= DEFAULT_CHUNK_TOKENS <= most:
        return DEFAULT_CHUNK_TOKENS
    power = 1 << (most.bit_length() - 1) if most > 0 else 0
    return power if power >= least else most


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Scope of the cache entries for a prompt's tokens."""

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
    p2p_advertised_url: str = ""  # where other servers read its memory; "": they do not


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
    """Result of a pin, unpin or delete. `requested` counts chunks, `affected` keys: 0 means no effect."""

    status: str
    requested: int = 0
    affected: int = 0
    skipped: int = 0  # refused because locked or pinned


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
