"""Events of a batch in slices of bounded size, so that a burst cannot hold the event loop. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvproxy.clients.kv_events.events import BlockRemoved, BlockStored, Effort, KvEvent


def sliced(events: Iterable[KvEvent | Effort], max_blocks: int) -> Iterator[tuple[list[KvEvent], int]]:
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
                batch, spent = [], 0
            continue
        for piece in _pieces(event, max_blocks):
            cost = max(1, piece.blocks)
            if batch and spent + cost > max_blocks:
                yield batch, spent
                batch, spent = [], 0
            batch.append(piece)
            spent += cost
    if batch or spent:
        yield batch, spent


def _pieces(event: KvEvent, size: int) -> Iterator[KvEvent]:
    if event.blocks <= size:
        yield event
    elif isinstance(event, BlockRemoved):
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
