"""Stored blocks as engines report them, in the words of the precise index."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvproxy.clients.kv_events.events import BlockStored, EngineHash
from kvproxy.prefix.hashing import mix_keys, token_blocks
from kvproxy.prefix.precise.pending_blocks import PendingBlock

_U64 = 2**64 - 1


def name_of(engine_hash: EngineHash) -> int:
    """Engines publish 64-bit integers (old ones signed) or whole digests."""
    return engine_hash & _U64 if isinstance(engine_hash, int) else xxh3_64_intdigest(engine_hash)


def _keys(engine_hashes: Sequence[EngineHash]) -> array[int]:
    try:
        return array("Q", engine_hashes)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return array("Q", [name_of(each) for each in engine_hashes])


def reported(event: BlockStored, tier: int) -> PendingBlock:
    """What the event says, with names as 64-bit integers."""
    parent = None if event.parent is None else name_of(event.parent)
    lora = event.lora_name or (f"lora_id {event.lora_id}" if event.lora_id is not None else "")
    return PendingBlock(parent, _keys(event.block_hashes), event.token_ids, event.extra, lora, tier)


def blocks_of(run: PendingBlock, block_size: int, seed: int) -> array[int]:
    """Our hashes of the run's blocks."""
    if run.extra is None:
        return token_blocks(run.token_ids, block_size, seed)
    blocks = array("Q")
    for index, keys in enumerate(run.extra):
        if keys:  # the LoRA's name is in the root already, and older engines do not list it here
            seed = mix_keys(seed, (key for key in keys if key != run.lora))
        seed = token_blocks(run.token_ids[index * block_size : (index + 1) * block_size], block_size, seed)[0]
        blocks.append(seed)
    return blocks
