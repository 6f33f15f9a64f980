"""Chains of blocks with media in them, as KV events report them: our hashes from the first block on, and where in them
which medium is. Bounded; the longest unused go first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.indexes.block_events import FOLDED, BlockExtra, BlockStored

_MAX_ENDS = 4096
_MAX_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 200
_MAX_MEDIA = 16_384
#: Latest chains of one length at one endpoint.
_ALIKE = 8

#: Name of a medium in events: vLLM's identifier, or the first id that SGLang puts in its place.
Identifier = str | int


class PlacedMedium(NamedTuple):
    """A medium of a chain: its name, its first token, and how many it has; 0: not all were reported."""

    identifier: Identifier
    start: int
    tokens: int


class _End(NamedTuple):
    """Last block of an event. Chains that grow share one array."""

    hashes: array[int]
    depth: int
    cost_bytes: int
    number: int  # of the event
    opened: tuple[Identifier, int] | None  # SGLang's: a medium that goes on behind it, and its tokens so far


class MediaChains:
    """Follows events from the first block with a medium on. Blocks of text in front of it come from the index."""

    def __init__(self) -> None:
        self.noted = 0  # events with media, or behind such
        self._ends: BoundedMapping[int, _End] = BoundedMapping(
            _MAX_ENDS, max_bytes=_MAX_BYTES, size_of=lambda end: end.cost_bytes
        )
        self._latest: BoundedMapping[tuple[EndpointId, int, int], tuple[int, ...]] = BoundedMapping(_MAX_ENDS)
        self._starts: BoundedMapping[int, tuple[tuple[Identifier, int], ...]] = BoundedMapping(_MAX_MEDIA)
        self._tokens: BoundedMapping[Identifier, int] = BoundedMapping(_MAX_MEDIA)

    def note_stored(
        self,
        endpoint: EndpointId,
        event: BlockStored,
        blocks: array[int],
        *,
        parent: int,
        find_front: Callable[[], array[int] | None],
    ) -> None:
        """Note blocks below `parent` (our hash of it), if they have media or come behind such. `find_front` returns the
        chain down to the parent."""
        before = self._ends.get(parent) if parent in self._ends else None
        named = event.extra is not None and any(map(_has_media, event.extra))
        if before is None and not named and not event.wide:
            return
        if before is None:
            front = find_front()
            if front is None:
                return
        else:
            front = before.hashes if len(before.hashes) == before.depth else before.hashes[: before.depth]
        size = len(event.token_ids) // len(blocks)
        cost_bytes = _ENTRY_BYTES + 8 * len(blocks)
        if before is None or front is not before.hashes:
            cost_bytes += 8 * len(front)
        opened = None if before is None else before.opened
        if event.extra is not None:
            self._note_named(event.extra, event.token_ids, blocks, size)
        if event.wide or opened is not None:
            opened = self._note_wide(event.token_ids, blocks, size, opened)
        self.noted += 1
        front.extend(blocks)
        depth = len(front)
        self._ends[blocks[-1]] = _End(front, depth, cost_bytes, self.noted, opened)
        place = endpoint, size, depth
        alike = [one for one in self._latest.get(place, ()) if one != blocks[-1]]
        self._latest[place] = (*alike[1 - _ALIKE :], blocks[-1])

    def find_chains(self, endpoint: EndpointId, *, block_size: int, blocks: int, since: int) -> Iterator[array[int]]:
        """Yield the chains of this length that ended an event of the endpoint after the first `since` events."""
        for last in self._latest.get((endpoint, block_size, blocks), ()):
            if last in self._ends and self._ends[last].number > since:
                yield self._ends[last].hashes[:blocks]

    def media_of(self, chain: Sequence[int], block_size: int) -> list[PlacedMedium]:
        """Return the media that begin in the blocks of a chain."""
        starts = self._starts
        return [
            PlacedMedium(identifier, number * block_size + offset, self._tokens.get(identifier, 0))
            for number, block in enumerate(chain)
            if block in starts
            for identifier, offset in starts[block]
        ]

    def _note_named(self, extra: Sequence[BlockExtra], tokens: TokenIds, blocks: Sequence[int], size: int) -> None:
        """Note the media in vLLM's extra keys: identifier and offset of each that a block touches."""
        for number, keys in enumerate(extra):
            found = list(_media_in(keys))
            begun = tuple((identifier, offset) for identifier, offset in found if offset >= 0)
            if begun:
                self._starts[blocks[number]] = begun
            following = None if number + 1 == len(extra) else set(_media_in(extra[number + 1]))
            for identifier, offset in found:
                if following is not None and (identifier, offset - size) in following:
                    continue
                first = number * size + max(offset, 0)
                block = tokens[first : (number + 1) * size]
                inside = set(tokens[max(number * size + offset, (number - 1) * size, 0) : number * size])
                count = _count_placeholders(block, inside if offset < 0 and inside else {block[0]})
                if following is not None or count < len(block):
                    self._tokens[identifier] = count - min(offset, 0)

    def _note_wide(
        self, tokens: TokenIds, blocks: Sequence[int], size: int, opened: tuple[Identifier, int] | None
    ) -> tuple[Identifier, int] | None:
        """Note media whose ids SGLang puts in the place of tokens; returns the one that goes on behind these."""
        for at, token in enumerate(tokens):
            if token & FOLDED:
                if opened is None:
                    opened = token, 0
                    block = blocks[at // size]
                    earlier = self._starts.get(block, ())
                    begun = token, at % size
                    self._starts[block] = earlier if begun in earlier else (*earlier, begun)
                opened = opened[0], opened[1] + 1
            elif opened is not None:
                self._tokens[opened[0]] = opened[1]
                opened = None
        return opened


def _media_in(keys: BlockExtra) -> Iterator[tuple[str, int]]:
    """Yield identifier and offset of each medium of a block; LoRA and salt are plain."""
    for key in keys or ():
        match key:
            case (str() as identifier, int() as offset):
                yield identifier, offset


def _has_media(keys: BlockExtra) -> bool:
    return any(True for _ in _media_in(keys))


def _count_placeholders(block: Sequence[int], inside: set[int]) -> int:
    """Return how many leading tokens belong to a medium that has these `inside`, its last row's end among them."""
    return next((at + 1 for at in range(len(block) - 1, -1, -1) if block[at] in inside), 0)
