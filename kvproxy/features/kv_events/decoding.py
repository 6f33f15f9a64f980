"""Decoding of KV events from frames of vLLM (0.11 to 0.32) and SGLang, and slices of events. Pure.

Up to vLLM 0.23, and in older SGLangs, an event is an array whose trailing fields a version may not have; later it is a
map. Hashes are 64-bit ints, SGLang's signed, or whole digests. A replay reply has the topic frame only from vLLM 0.28
on, so frames are read from the end.

vLLM's offloading names the blocks that it copies, but not their tokens: a `block_size` of 0.

SGLang sends one event a page, or runs of pages as one. With EAGLE or MTP its radix tree is keyed by pairs of
neighbouring tokens, and the events name those pairs: their first tokens are the page's own. In the place of a picture
its ids are four of 62 bits in turn, which name it.

No step of the decoding takes long for any input: counts are bounded before anything is made of them, and between the
steps of a long event there is an `Effort`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvproxy.base.errors import BadResponse
from kvproxy.cache.clients.tokens import TokenIds, WireTokenId, token_array
from kvproxy.cache.indexes.block_events import (
    FOLDED,
    AllBlocksCleared,
    BlockExtra,
    BlockRemoved,
    BlockStored,
    EngineHash,
    KvEvent,
)


@dataclass(frozen=True, slots=True)
class Effort:
    """Work that led to no event yet, in blocks whose handling costs about as much: an event that is skipped, or a long
    one that is decoded step by step."""

    blocks: int = 1


#: Events that could not be used, by reason: `unknown_type` is harmless, `malformed` may leave the index wrong.
Skipped = dict[str, int]


def slice_events(events: Iterable[KvEvent | Effort], max_blocks: int) -> Iterator[tuple[list[KvEvent], int]]:
    """`events` in order, in lists of at most `max_blocks` blocks, each with what it cost; a longer event is cut where
    that changes nothing. Effort fills a list as blocks do, so that a list may be empty.
    """
    batch: list[KvEvent] = []
    spent = 0
    for event in events:
        if isinstance(event, Effort):
            spent += event.blocks
            if spent >= max_blocks:
                yield batch, spent
                batch = []
                spent = 0
            continue
        blocks = event.blocks
        for piece in (event,) if blocks <= max_blocks else _pieces(event, max_blocks):
            cost = max(1, blocks if piece is event else piece.blocks)
            if batch and spent + cost > max_blocks:
                yield batch, spent
                batch = []
                spent = 0
            batch.append(piece)
            spent += cost
    if batch or spent:
        yield batch, spent


def _pieces(event: KvEvent, size: int) -> Iterator[KvEvent]:
    """Cut an event of more than `size` blocks."""
    if isinstance(event, BlockRemoved):
        for start in range(0, event.blocks, size):
            yield replace(event, block_hashes=event.block_hashes[start : start + size])
    elif isinstance(event, BlockStored) and event.uniform:
        for start in range(0, event.blocks, size):
            yield _stored_piece(event, start, start + size)
    else:
        yield event


def _stored_piece(event: BlockStored, start: int, end: int) -> BlockStored:
    """Blocks start..end; the parent of a later piece is the block before it."""
    return replace(
        event,
        block_hashes=event.block_hashes[start:end],
        parent=event.block_hashes[start - 1] if start else event.parent,
        token_ids=event.token_ids[start * event.block_tokens : end * event.block_tokens],
        extra=None if event.extra is None else event.extra[start:end],
    )


#: Sequence number of the marker that ends a replay.
END_OF_REPLAY = b"\xff" * 8

#: Largest payload accepted.
MAX_PAYLOAD_BYTES = 8 << 20

#: Events of a batch, and tokens and blocks of an event; beyond it the batch, or the event, counts as malformed.
MAX_EVENTS = 100_000
MAX_EVENT_TOKENS = 1 << 18
MAX_EVENT_BLOCKS = 1 << 16
#: A pair takes four times as long as a token.
_MAX_EVENT_PAIRS = 1 << 16

#: Bytes whose decoding costs about as much as handling one block.
_BYTES_A_BLOCK = 512

_MAX_EXTRA_DEPTH = 4
#: A longer extra key (a client's long salt), or one with more values, is replaced by its digest.
_MAX_EXTRA_BYTES = 512
_MAX_EXTRA_VALUES = 32
#: Bytes of extra keys decoded at a time.
_EXTRA_STEP_BYTES = 16_384
_NIL = b"\xc0"
_FAILURES = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Hash = int | Annotated[bytes, msgspec.Meta(max_length=64)]
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=MAX_EVENT_BLOCKS)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]


class _StoredFields(msgspec.Struct):
    """Fields that arrays have too, in their order."""

    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: msgspec.Raw
    block_size: _Size
    lora_id: int | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENT_BLOCKS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: int | None = None


class _BlockStored(_StoredFields, tag="BlockStored"):
    cache_salt: str | None = None  # SGLang's; vLLM has it among the extra keys


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: _Name | None = None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_StoredFields, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(_AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class _MapTag(msgspec.Struct):
    type: _Name


class _ArrayTag(msgspec.Struct, array_like=True):
    type: _Name


_BATCH = msgspec.msgpack.Decoder(_Batch)
_MAP_EVENT = msgspec.msgpack.Decoder(_BlockStored | _BlockRemoved | _AllBlocksCleared)
_ARRAY_EVENT = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_TOKENS = msgspec.msgpack.Decoder(Annotated[list[WireTokenId], msgspec.Meta(max_length=MAX_EVENT_TOKENS)])
_PAIRS = msgspec.msgpack.Decoder(
    Annotated[list[tuple[WireTokenId, WireTokenId]], msgspec.Meta(max_length=_MAX_EVENT_PAIRS)]
)
#: With ids of SGLang's that name a picture, of 62 bits.
_WideId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_WIDE_TOKENS = msgspec.msgpack.Decoder(Annotated[list[_WideId], msgspec.Meta(max_length=MAX_EVENT_TOKENS)])
_WIDE_PAIRS = msgspec.msgpack.Decoder(
    Annotated[list[tuple[_WideId, _WideId]], msgspec.Meta(max_length=_MAX_EVENT_PAIRS)]
)
_LARGEST_TOKEN = 2**32 - 1
#: Position of the first element of a msgpack array by the array's first byte, and first bytes of an array of two.
_FIRST_AT = {0xDC: 3, 0xDD: 5}
_TWO = 0x92
_MAP_TAG = msgspec.msgpack.Decoder(_MapTag)
_ARRAY_TAG = msgspec.msgpack.Decoder(_ArrayTag)
_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class KvEventBatch:
    """One published batch. Its events are decoded one by one, so that a large batch can be taken in slices."""

    __slots__ = ("_events", "seq", "ts")

    def __init__(self, seq: int, batch: _Batch) -> None:
        self.seq = seq
        self.ts = batch.ts  # the engine's wall clock, seconds
        self._events = batch.events

    def __len__(self) -> int:
        return len(self._events)

    @property
    def encoding(self) -> str:
        """Encoding: `map` (from 0.24 on) or `array`; empty without an event."""
        if not self._events:
            return ""
        return "map" if _is_map(self._events[0]) else "array"

    def events(self, skipped: Skipped) -> Iterator[KvEvent]:
        """Yield the events in order; those that cannot be used are counted and passed over."""
        return (step for step in self.steps(skipped) if not isinstance(step, Effort))

    def steps(self, skipped: Skipped) -> Iterator[KvEvent | Effort]:
        """Yield the same with the effort between them: a place to let others run."""
        for raw in self._events:
            try:
                yield from _steps(raw)
            except (*_FAILURES, ValueError):
                reason = _why_unreadable(raw)
                skipped[reason] = skipped.get(reason, 0) + 1
                yield Effort()


def sequence_number(frames: Sequence[bytes]) -> int | None:
    """Return the batch number of a message; None for the marker that ends a replay. Raises BadResponse."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise BadResponse("kv events: not a batch")
    return None if frames[-2] == END_OF_REPLAY else int.from_bytes(frames[-2], "big")


def decode_batch(frames: Sequence[bytes]) -> KvEventBatch:
    """Return the batch in a message's frames. Raises BadResponse for anything that is none, a replay's end included."""
    seq = sequence_number(frames)
    if seq is None:
        raise BadResponse("kv events: end of replay, not a batch")
    if len(frames[-1]) > MAX_PAYLOAD_BYTES:
        raise BadResponse(f"kv events: batch over {MAX_PAYLOAD_BYTES} bytes")
    try:
        return KvEventBatch(seq, _BATCH.decode(frames[-1]))
    except _FAILURES as error:
        raise BadResponse("kv events: unreadable batch") from error


def _steps(raw: msgspec.Raw) -> Iterator[KvEvent | Effort]:
    """One event, and before it the effort it took beyond an ordinary one's."""
    event = (_MAP_EVENT if _is_map(raw) else _ARRAY_EVENT).decode(raw)
    size = len(memoryview(raw))
    if size > _EXTRA_STEP_BYTES:
        yield Effort(size // _BYTES_A_BLOCK)
    if isinstance(event, _StoredFields):
        yield (yield from _stored(event))
    elif isinstance(event, _BlockRemoved):
        yield BlockRemoved(tuple(event.block_hashes), event.medium or "GPU", event.group_idx)
    else:
        yield AllBlocksCleared()


def _is_map(raw: msgspec.Raw) -> bool:
    data = memoryview(raw)
    return len(data) > 0 and (data[0] & 0xF0 == 0x80 or data[0] in (0xDE, 0xDF))


def _names_pairs(tokens: msgspec.Raw) -> bool:
    data = memoryview(tokens)
    first = _FIRST_AT.get(data[0], 1) if len(data) else 0
    return first < len(data) and data[first] == _TWO


def _decode_tokens(raw: msgspec.Raw, *, pairs: bool) -> tuple[TokenIds, bool]:
    """Return the ids as they are, or with those that name a picture, in the place of its tokens, folded into 32
    bits, and whether there are such."""
    try:
        return token_array([first for first, _ in _PAIRS.decode(raw)] if pairs else _TOKENS.decode(raw)), False
    except msgspec.ValidationError:
        ids = [first for first, _ in _WIDE_PAIRS.decode(raw)] if pairs else _WIDE_TOKENS.decode(raw)
    fold = cache(_fold)  # a picture repeats four of them
    return token_array([one if one <= _LARGEST_TOKEN else fold(one) for one in ids]), True


def _fold(wide: int) -> int:
    return FOLDED | (xxh3_64_intdigest(wide.to_bytes(8, "little")) & (FOLDED - 1))


def _stored(event: _StoredFields) -> Generator[Effort, None, BlockStored]:
    pairs = _names_pairs(event.token_ids)
    tokens, wide = _decode_tokens(event.token_ids, pairs=pairs)
    if tokens and not event.block_size:
        raise ValueError("tokens in blocks of none")
    if len(tokens) > _EXTRA_STEP_BYTES:
        yield Effort(len(tokens) * tokens.itemsize // _BYTES_A_BLOCK)
    keys = event.extra_keys
    extra: tuple[BlockExtra, ...] | None = None
    if keys and any(map(_NIL.__ne__, map(bytes, keys))):
        if len(keys) != len(event.block_hashes):
            raise ValueError("extra keys do not match the blocks")
        extra = yield from _extras(keys)
    elif isinstance(event, _BlockStored) and event.cache_salt and event.parent_block_hash is None:
        extra = (_salted(event.cache_salt), *(None,) * (len(event.block_hashes) - 1))
    hashes: tuple[EngineHash, ...] = tuple(event.block_hashes)
    return BlockStored(
        block_hashes=hashes,
        parent=event.parent_block_hash,
        token_ids=tokens,
        block_tokens=event.block_size,
        lora_name=event.lora_name,
        lora_id=event.lora_id,
        medium=event.medium or "GPU",
        extra=extra,
        group=event.group_idx,
        spec_kind=event.kv_cache_spec_kind,
        window=event.kv_cache_spec_sliding_window,
        pairs=pairs,
        wide=wide,
    )


def _salted(salt: str) -> BlockExtra:
    """Return the extra key of a chain's first block for its salt."""
    return (salt,) if len(salt) <= _MAX_EXTRA_BYTES else ("digest", blake2b(salt.encode(), digest_size=16).digest())


def _extras(keys: Sequence[msgspec.Raw]) -> Generator[Effort, None, tuple[BlockExtra, ...]]:
    """Each block's key; blocks mostly have the same one."""
    known: dict[bytes, BlockExtra] = {_NIL: None}
    found: list[BlockExtra] = []
    undecoded = _EXTRA_STEP_BYTES
    for raw in map(bytes, keys):
        if raw not in known:
            undecoded -= len(raw)
            if undecoded < 0:
                undecoded = _EXTRA_STEP_BYTES
                yield Effort(_EXTRA_STEP_BYTES)
            known[raw] = _extra(raw)
        found.append(known[raw])
    return tuple(found)


def _extra(raw: bytes) -> BlockExtra:
    value = msgspec.msgpack.decode(raw) if len(raw) <= _MAX_EXTRA_BYTES else None
    if value is None or _count(value) > _MAX_EXTRA_VALUES:
        return ("digest", blake2b(raw, digest_size=16).digest())
    frozen = _frozen(value, _MAX_EXTRA_DEPTH)
    return frozen if isinstance(frozen, tuple) else (frozen,)


def _count(value: Any) -> int:
    """Values in it, itself included."""
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def _frozen(value: Any, depth: int) -> object:
    """`value` with lists as tuples, so that it can be part of a key. Raises ValueError for what no engine sends."""
    if isinstance(value, list) and depth:
        return tuple(_frozen(item, depth - 1) for item in value)
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    raise ValueError("extra key of an unknown kind")


def _why_unreadable(raw: msgspec.Raw) -> str:
    """Return `unknown_type` for an event of a type that this version lacks, else `malformed`."""
    try:
        named = (_MAP_TAG if _is_map(raw) else _ARRAY_TAG).decode(raw).type
    except (*_FAILURES, ValueError):
        return "malformed"
    return "malformed" if named in _KNOWN_TYPES else "unknown_type"
