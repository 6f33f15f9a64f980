"""The precise index: follows the engines' KV events, block by block and tier by tier.

Blocks are named by our own chained hash over the event's tokens, so no engine has to agree with us on a hash. A store
behind an engine may keep larger blocks than the engine does (LMCache's chunks): it is a source of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cache.indexes.block_events import WHOLE_PREFIX, BlockRemoved, BlockStored, EngineHash, KvEvent
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.layer_groups import LayerGroup, LayerKind
from kvproxy.cache.indexes.medium_tiers import MediumTiers
from kvproxy.cache.indexes.prompt_matcher import PromptMatcher
from kvproxy.cache.indexes.runs import KEY_BITS
from kvproxy.cache.indexes.source_tables import STORE, Rank, Source, SourceTables
from kvproxy.cache.prefix.hashing import mix_keys, root_seed, token_blocks

#: Sources from which on what they hold of common beginnings is kept.
MANY_SOURCES = 16

#: Adapters whose chains were begun recently.
_REMEMBERED_ROOTS = 1024
_KEY = 2**KEY_BITS - 1


@dataclass(slots=True)
class PreciseCounts:
    """Counts of events by outcome, in blocks (`malformed`: events)."""

    stored: int = 0
    removed: int = 0
    removed_unknown: int = 0
    orphaned: int = 0  # below a block that was not reported, whose prefix is unknown
    malformed: int = 0


class NotesMedia(Protocol):
    """Receiver of stored blocks in an engine's own memory, which may have media."""

    #: Events with media, or behind such, until now.
    noted: int

    def note_stored(
        self,
        endpoint: EndpointId,
        event: BlockStored,
        blocks: array[int],
        *,
        parent: int,
        find_front: Callable[[], array[int] | None],
    ) -> None:
        """Note blocks below `parent` (our hash of it); `find_front` returns the chain down to there."""
        ...


class PreciseIndex:
    """Bounded by `max_blocks` rows a source (endpoint, data-parallel rank, KV cache group) and `max_sources`."""

    def __init__(
        self,
        *,
        max_blocks: int = 4_000_000,
        max_ghosts: int = 16_384,
        max_sources: int = 4096,
        many_sources: int = MANY_SOURCES,
    ) -> None:
        self.counts = PreciseCounts()
        self.media: NotesMedia | None = None
        self.tables = SourceTables(max_rows=max_blocks, max_ghosts=max_ghosts, max_sources=max_sources)
        self._tiers = MediumTiers()
        self.matcher = PromptMatcher(self.tables, self._tiers, many=many_sources)
        self._root = lru_cache(_REMEMBERED_ROOTS)(precise_root)
        self.clear_rank = self.tables.clear_rank
        self.remove_endpoint = self.tables.remove_endpoint
        self.sweep_rows = self.tables.sweep_rows
        self.count_rows = self.tables.count_rows
        self.step_tokens = self.tables.step_tokens
        self.lacks_prefixes = self.tables.lacks_prefixes
        self.match_prompt = self.matcher.match_prompt
        self.match_store = self.matcher.match_store

    def apply_events(self, endpoint: EndpointId, dp_rank: int, events: Iterable[KvEvent]) -> None:
        """Follow the events of one rank, in order. Their number is the caller's to bound."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(endpoint, dp_rank, event)
            elif isinstance(event, BlockRemoved):
                self._removed((endpoint, dp_rank, event.group or 0), event)
            else:
                self.clear_rank(endpoint, dp_rank, spare_store=True)

    @property
    def block_sizes(self) -> frozenset[int]:
        """Block sizes in use; a lookup needs the prompt hashed in each."""
        return frozenset(self.tables.sizes)

    def walk_tiers(self, endpoint: EndpointId) -> Iterator[tuple[Tier, int, int]]:
        """Tier, blocks and tokens of what the endpoint holds, in pieces."""
        kinds = self._tiers.kinds
        for table in [table for source, table in self.tables.by_source.items() if source[0] == endpoint]:
            for bits, blocks in table.walk_tiers() if len(kinds) > 1 else [(1, len(table))]:
                on = [tier for bit, tier in enumerate(kinds) if bits >> bit & 1]
                yield from ((tier, blocks, blocks * table.block_size) for tier in on)

    def _stored(self, endpoint: EndpointId, dp_rank: int, event: BlockStored) -> None:
        if not event.token_ids:
            self._copied((endpoint, dp_rank, event.group or 0), event)
            return
        if event.spec_kind not in WHOLE_PREFIX:
            self._stored_layers((endpoint, dp_rank), event)
            return
        tier = self._tiers.bits.get(event.medium)
        if tier is None:
            tier = self._tiers.find_bit(event.medium)
        if tier is None or not event.uniform or (event.extra is not None and len(event.extra) != event.blocks):
            self.counts.malformed += 1
            return
        source = endpoint, dp_rank, event.group or 0
        table = self.tables.by_source.get(source)
        if tier and table is not None and table.block_size != event.block_tokens:
            source = endpoint, dp_rank, STORE
            table = self.tables.by_source.get(source)
        if table is None or table.block_size != event.block_tokens:
            if table is not None and (
                event.blocks == 1 and event.parent is not None and event.block_tokens < table.block_size
            ):  # the rest of SGLang's node, part of no page, and not the first block of an engine that uses others now
                return
            table = self.tables.begin(source, event.block_tokens)
            if table is None:
                return
        if self.matcher.beginnings is not None:
            self.matcher.beginnings.note_change(endpoint)
        self._place(endpoint, table, event, tier)
        if self.tables.swept:
            self.tables.sweep_rows()

    def _copied(self, source: Source, event: BlockStored) -> None:
        """Store blocks on another tier, by the names under which they were reported with their tokens."""
        table = self.tables.by_source.get(source)
        tier = self._tiers.find_bit(event.medium)
        if table is None or tier is None:
            return
        if self.matcher.beginnings is not None:
            self.matcher.beginnings.note_change(source[0])
        for key in keys_of(event.block_hashes):
            table.copy_block(key, tier)

    def _stored_layers(self, rank: Rank, event: BlockStored) -> None:
        """Store blocks of a group that makes no prefix. Those on lower tiers are left out, which only lowers the
        estimate."""
        kind = LayerKind.of(event)
        if kind is None or self._tiers.find_bit(event.medium) != 0:
            return
        layers = self.tables.enter_layers(rank)
        if layers is None:
            return
        group, former = layers.follow_event(event.group or 0, kind)
        if former is not None:
            self.tables.swept.append(former)
        if group is not None:
            group.store(keys_of(event.block_hashes), self.tables.max_rows)

    def _removed_layers(self, group: LayerGroup, event: BlockRemoved) -> None:
        removed = sum(group.remove(key) for key in keys_of(event.block_hashes)) if event.medium == "GPU" else 0
        self.counts.removed += removed
        self.counts.removed_unknown += event.blocks - removed

    def _removed(self, source: Source, event: BlockRemoved) -> None:
        layers = self.tables.layers.get(source[:2])
        if layers is not None and (group := layers.find(source[2])) is not None:
            self._removed_layers(group, event)
            return
        table = self.tables.by_source.get(source)
        tier = self._tiers.find_bit(event.medium)
        if table is None or tier is None:
            self.counts.removed_unknown += event.blocks
            return
        if self.matcher.beginnings is not None:
            self.matcher.beginnings.note_change(source[0])
        store = self.tables.by_source.get((*source[:2], STORE)) if tier else None
        for key in keys_of(event.block_hashes):
            if table.remove_block(key, tier) or (store is not None and store.remove_block(key, tier)):
                self.counts.removed += 1
            else:
                self.counts.removed_unknown += 1

    def _place(self, endpoint: EndpointId, table: BlockTable, event: BlockStored, tier: int) -> None:
        """Store the blocks. What comes below a block that was not reported is left out: no prompt is known to lead
        there."""
        keys = keys_of(event.block_hashes)
        above = parent = None
        seed: int | None
        lora = event.lora_name or (f"lora_id {event.lora_id}" if event.lora_id is not None else "")
        if event.parent is None:
            seed = self._root(table.block_size, lora=lora)
        else:
            parent = key_of(event.parent)
            above = table.find_place(parent)
            seed = table.removed_block(parent) if above is None else above[0].blocks[above[1]]
        if seed is None:
            self.counts.orphaned += len(keys)
            return
        blocks = blocks_of(event, lora, seed)
        if (parent is None or above is not None) and table.store_new(keys, blocks, above, tier):
            self.counts.stored += len(blocks)
            media = self.media
            if media is not None and not tier and (event.extra is not None or event.wide or media.noted):
                _note_media(media, endpoint, table, event, blocks, seed)
            return
        different = set(keys)
        if len(different) != len(keys) or parent in different:  # a block twice, or below itself
            self.counts.malformed += 1
            return
        stored = table.store_blocks(keys, blocks, parent, tier)
        self.counts.stored += stored
        if self.media is not None and not tier and stored == len(keys):
            _note_media(self.media, endpoint, table, event, blocks, seed)


def _note_media(
    media: NotesMedia,
    endpoint: EndpointId,
    table: BlockTable,
    event: BlockStored,
    blocks: array[int],
    seed: int,
) -> None:
    """Note the media in an event of an engine's own memory, below this block."""

    def find_front() -> array[int] | None:
        if event.parent is None:
            return array("Q")
        place = table.find_place(key_of(event.parent))
        return None if place is None else table.walk_up(place)

    media.note_stored(endpoint, event, blocks, parent=seed, find_front=find_front)


def precise_root(block_size: int, *, lora: str = "", cache_salt: str | None = None) -> int:
    """Where a prompt's chain starts, so that it meets the blocks engines report for it."""
    return root_seed(block_size=block_size, lora=lora, cache_salt=cache_salt)


def keys_of(engine_hashes: Sequence[EngineHash]) -> array[int]:
    """Engines publish 64-bit integers (old ones signed) or whole digests."""
    try:
        return array("Q", [each & _KEY for each in engine_hashes])
    except TypeError:
        return array("Q", map(key_of, engine_hashes))


def key_of(engine_hash: EngineHash) -> int:
    key: int = (engine_hash if isinstance(engine_hash, int) else xxh3_64_intdigest(engine_hash)) & _KEY
    return key


def blocks_of(event: BlockStored, lora: str, seed: int) -> array[int]:
    """Our hashes of the reported blocks, below the one with the hash `seed`."""
    size = event.block_tokens
    if event.extra is None:
        return token_blocks(event.token_ids, size, seed)
    blocks = array("Q")
    for index, keys in enumerate(event.extra):
        if keys:  # the LoRA's name is in the root already, and older engines do not list it here
            seed = mix_keys(seed, (key for key in keys if key != lora))
        seed = token_blocks(event.token_ids[index * size : (index + 1) * size], size, seed)[0]
        blocks.append(seed)
    return blocks
