"""Cache events as vLLM puts them on the wire, in the encodings of several of its versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kvproxy.simulator.kv_event import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

#: What a replay ends with: a sequence number of -1 and nothing in it.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class EventEncoding(StrEnum):
    """Named after the first vLLM version that writes it so."""

    V0_11 = "0.11"  # arrays; replies to a replay have no topic frame
    V0_22 = "0.22"  # arrays with LoRA name, extra keys, group, kind
    V0_24 = "0.24"  # maps of the same fields
    V0_28 = "0.28"  # maps; replies to a replay have a topic frame

    @property
    def replay_has_topic(self) -> bool:
        """Whether a reply to a replay request names the topic."""
        return self is EventEncoding.V0_28


class EventEncoder:
    """Turns one step's events into a message payload. `bytes_hashes` writes hashes as 16 bytes instead of integers."""

    def __init__(
        self, *, block_size: int, encoding: EventEncoding = EventEncoding.V0_28, bytes_hashes: bool = False
    ) -> None:
        self._block_size = block_size
        self._encoding = encoding
        self._bytes_hashes = bytes_hashes
        self._encoder = msgspec.msgpack.Encoder()
        self._write: Callable[[dict[str, Any]], Any] = {
            EventEncoding.V0_11: self._short_array,
            EventEncoding.V0_22: self._long_array,
        }.get(encoding, lambda event: event)

    def payload(self, events: Sequence[KvEvent], *, ts: float, rank: int = 0) -> bytes:
        """The msgpack batch; `ts` is wall-clock seconds, `rank` the data-parallel rank."""
        return self._encoder.encode([ts, [self._write(self._map(event)) for event in events], rank])

    def _hash(self, block_hash: int) -> int | bytes:
        return block_hash.to_bytes(16, "big") if self._bytes_hashes else block_hash

    def _map(self, event: KvEvent) -> dict[str, Any]:
        if isinstance(event, AllBlocksCleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, BlockRemoved):
            hashes = [self._hash(event.block_hash)]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
        return self._stored(event)

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(block_hash) for block_hash in event.block_hashes],
            "parent_block_hash": None if event.parent is None else self._hash(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_size,
            "lora_id": event.lora_id,
            "medium": "GPU",
            "lora_name": event.lora_name,
            "extra_keys": event.extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _short_array(self, event: dict[str, Any]) -> list[Any]:
        new_since = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")
        return [value for name, value in event.items() if name not in new_since]

    def _long_array(self, event: dict[str, Any]) -> list[Any]:
        window = [None] if event["type"] == "BlockStored" else []
        return [*event.values(), *window]
