"""How a simulated SGLang writes KV events: a page an event, as maps or, in older releases, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from kvproxy.lab.simulator.engine_io import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvproxy.lab.simulator.sglang_settings import EventForm

_MEDIUM = "GPU"


class PageEncoder:
    """Turns one step's events into a message payload."""

    def __init__(self, *, page_size: int, form: EventForm, paired: bool) -> None:
        self._page_size = page_size
        self._form = form
        self._paired = paired
        self._encoder = msgspec.msgpack.Encoder()

    def encode_payload(self, events: Sequence[KvEvent], *, ts: float, rank: int = 0) -> bytes:
        """Return the msgpack batch; `ts` is wall-clock seconds, `rank` the attention's data-parallel rank."""
        written = [self._write(fields) for event in events for fields in self._fields(event)]
        return self._encoder.encode([ts, written, rank])

    def _fields(self, event: KvEvent) -> Iterator[dict[str, Any]]:
        if isinstance(event, AllBlocksCleared):
            yield {"type": "AllBlocksCleared"}
        elif isinstance(event, BlockRemoved):
            yield {"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": _MEDIUM}
        else:
            yield from self._pages(event)

    def _pages(self, event: BlockStored) -> Iterator[dict[str, Any]]:
        parent = event.parent
        size = self._page_size
        tokens = event.token_ids
        for number, page_hash in enumerate(event.block_hashes):
            page = tokens[number * size : (number + 1) * size + self._paired]
            keys = list(pairwise(page)) if self._paired else page
            salts = [key for keys_of_page in event.extra_keys[number : number + 1] for key in keys_of_page or ()]
            yield {
                "type": "BlockStored",
                "block_hashes": [page_hash],
                "parent_block_hash": parent,
                "token_ids": keys,
                "block_size": size,
                "lora_id": None,
                "medium": _MEDIUM,
                **({"cache_salt": salts[-1]} if salts else {}),
            }
            parent = page_hash

    def _write(self, fields: dict[str, Any]) -> Any:
        if self._form is EventForm.MAP:
            return fields
        return [value for name, value in fields.items() if name != "cache_salt"]
