"""vLLM's KV event frames, from 0.11 to 0.32, as typed events. Pure.

Up to 0.23 an event is an array whose trailing fields a version may not have; from 0.24 on it is a map. Hashes are
64-bit ints or whole digests. A replay reply has the topic frame only from 0.28 on, so frames are read from the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from kvproxy.clients.kv_events.events import (
    AllBlocksCleared,
    BlockExtra,
    BlockRemoved,
    BlockStored,
    EngineHash,
    KvEvent,
    Skipped,
)
from kvproxy.clients.tokens import WireTokenId, token_array
from kvproxy.errors import BadResponse

#: Sequence number of the marker that ends a replay.
END_OF_REPLAY = b"\xff" * 8

#: Largest payload accepted: a re-report of a million tokens fits.
MAX_PAYLOAD_BYTES = 8 << 20

_MAX_EXTRA_DEPTH = 4
_FAILURES = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_Positive = Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]
_Hashes = list[int | bytes]


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None
    token_ids: list[WireTokenId]
    block_size: _Positive
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(_Batch)
_MAP_EVENT = msgspec.msgpack.Decoder(_BlockStored | _BlockRemoved | _AllBlocksCleared)
_ARRAY_EVENT = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class KvEventBatch:
    """One published batch. Its events are decoded one by one, so that a large batch can be taken in slices."""

    __slots__ = ("_events", "dp_rank", "seq", "ts")

    def __init__(self, seq: int, batch: _Batch) -> None:
        self.seq = seq
        self.ts = batch.ts  # the engine's wall clock, seconds
        self.dp_rank = batch.data_parallel_rank
        self._events = batch.events

    def __len__(self) -> int:
        return len(self._events)

    @property
    def encoding(self) -> str:
        """`map` (from 0.24 on) or `array`; empty when there is no event to tell by."""
        if not self._events:
            return ""
        return "map" if _is_map(self._events[0]) else "array"

    def events(self, skipped: Skipped) -> Iterator[KvEvent]:
        """The events in order; those that cannot be used are counted and passed over."""
        for raw in self._events:
            event = _event(raw)
            if isinstance(event, str):
                skipped.counts[event] += 1
            else:
                yield event


def sequence_number(frames: Sequence[bytes]) -> int | None:
    """The batch number of a message; None for the marker that ends a replay. Raises BadResponse."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise BadResponse("kv events: not a batch")
    return None if frames[-2] == END_OF_REPLAY else int.from_bytes(frames[-2], "big")


def decode_batch(frames: Sequence[bytes]) -> KvEventBatch:
    """The batch in a message's frames. Raises BadResponse for anything that is none, a replay's end included."""
    seq = sequence_number(frames)
    if seq is None:
        raise BadResponse("kv events: end of replay, not a batch")
    if len(frames[-1]) > MAX_PAYLOAD_BYTES:
        raise BadResponse(f"kv events: batch over {MAX_PAYLOAD_BYTES} bytes")
    try:
        return KvEventBatch(seq, _BATCH.decode(frames[-1]))
    except _FAILURES as error:
        raise BadResponse("kv events: unreadable batch") from error


def _event(raw: msgspec.Raw) -> KvEvent | str:
    """One event, or why it is skipped."""
    try:
        event = (_MAP_EVENT if _is_map(raw) else _ARRAY_EVENT).decode(raw)
        if isinstance(event, _BlockStored):
            return _stored(event)
        if isinstance(event, _BlockRemoved):
            return BlockRemoved(tuple(event.block_hashes), event.medium or "GPU", event.group_idx)
        return AllBlocksCleared()
    except (*_FAILURES, ValueError):
        return _why_unreadable(raw)


def _is_map(raw: msgspec.Raw) -> bool:
    data = memoryview(raw)
    return len(data) > 0 and (data[0] & 0xF0 == 0x80 or data[0] in (0xDE, 0xDF))


def _stored(event: _BlockStored) -> BlockStored:
    keys = event.extra_keys
    extra: tuple[BlockExtra, ...] | None = None
    if keys and any(key is not None for key in keys):
        if len(keys) != len(event.block_hashes):
            raise ValueError("extra keys do not match the blocks")
        extra = tuple(None if key is None else _extra(key) for key in keys)
    hashes: tuple[EngineHash, ...] = tuple(event.block_hashes)
    return BlockStored(
        block_hashes=hashes,
        parent=event.parent_block_hash,
        token_ids=token_array(event.token_ids),
        block_tokens=event.block_size,
        lora_name=event.lora_name,
        lora_id=event.lora_id,
        medium=event.medium or "GPU",
        extra=extra,
        group=event.group_idx,
        spec_kind=event.kv_cache_spec_kind,
    )


def _extra(key: Any) -> BlockExtra:
    frozen = _frozen(key, _MAX_EXTRA_DEPTH)
    return frozen if isinstance(frozen, tuple) else (frozen,)


def _frozen(value: Any, depth: int) -> object:
    """`value` with lists as tuples, so that it can be part of a key. Raises ValueError for what no engine sends."""
    if isinstance(value, list) and depth:
        return tuple(_frozen(item, depth - 1) for item in value)
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    raise ValueError("extra key of an unknown kind")


def _why_unreadable(raw: msgspec.Raw) -> str:
    """`unknown_type` for an event of a type this version does not know, else `malformed`."""
    try:
        value = msgspec.msgpack.decode(raw)
    except _FAILURES:
        return "malformed"
    name = value.get("type") if isinstance(value, dict) else value[0] if isinstance(value, list) and value else None
    return "unknown_type" if isinstance(name, str) and name not in _KNOWN_TYPES else "malformed"
