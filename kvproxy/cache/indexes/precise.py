"""The precise index: follows the engines' KV events, block by block and tier by tier.

Blocks are named by our own chained hash over the event's tokens, so no engine has to agree with us on a hash. A store
behind an engine may keep larger blocks than the engine does (LMCache's chunks): it is a source of its own.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import lcm

from xxhash import xxh3_64_intdigest

from kvproxy.base.types import EndpointId, LowerTokens, Tier, skip_lower
from kvproxy.cache.indexes.beginnings import Beginnings, PreciseMatch
from kvproxy.cache.indexes.block_events import WHOLE_PREFIX, BlockRemoved, BlockStored, EngineHash, KvEvent
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.layer_groups import LayerGroup, LayerGroups, LayerKind
from kvproxy.cache.indexes.media_chains import MediaChains
from kvproxy.cache.indexes.runs import KEY_BITS, MAX_TIERS
from kvproxy.cache.prefix.hashing import mix_keys, root_seed, token_blocks

#: Rows of sources that were cleared or left, dropped per operation.
STEP_ROWS = 1024

#: Sources from which on what they hold of common beginnings is kept.
MANY_SOURCES = 16

#: Adapters whose chains were begun recently.
_REMEMBERED_ROOTS = 1024
_KEY = 2**KEY_BITS - 1

#: Tiers by the engines' names of media; an unknown one counts as near, since the reverse error costs more.
TIER_OF: Mapping[str, Tier] = {
    "GPU": Tier.DEVICE,
    "CPU_PINNED": Tier.PINNED,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.SHARED,
}


@dataclass(slots=True)
class PreciseCounts:
    """Counts of events by outcome, in blocks (`malformed`, `other_groups` and `short_pages`: events)."""

    stored: int = 0
    removed: int = 0
    removed_unknown: int = 0
    orphaned: int = 0  # below a block that was not reported, whose prefix is unknown
    over_bound: int = 0
    malformed: int = 0
    other_groups: int = 0
    short_pages: int = 0  # ends of SGLang's nodes, which it reuses as part of no page


_Rank = tuple[EndpointId, int]
_Source = tuple[EndpointId, int, int]  # endpoint, data-parallel rank, KV cache group (or _STORE)
_STORE = -1  # blocks of another size than the engine's, on lower tiers only


_Match = Callable[["array[int]", int], tuple[int, int, int]]
#: A source, its table, that table's block size and `match`, and whether its endpoint has no other source.
_Asked = tuple[_Source, BlockTable, int, _Match, bool]


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
        self._max_blocks = max_blocks
        self._max_ghosts = max_ghosts
        self._max_sources = max_sources
        self._many_sources = many_sources
        self._tiers = {"GPU": 0}  # by medium; 0 is the engine's own memory
        self._kinds = [Tier.DEVICE]  # in the same order
        self._tables: dict[_Source, BlockTable] = {}
        self._layers: dict[_Rank, LayerGroups] = {}  # of hybrid models
        self._sizes: Counter[int] = Counter()  # sources by block size
        self._asked: list[_Asked] | None = None  # None: to be worked out again
        #: Of a fleet of alike sources; None: every prompt asks each source.
        self._beginnings: Beginnings | None = None
        self._swept: deque[BlockTable | LayerGroup] = deque()
        self._root = lru_cache(_REMEMBERED_ROOTS)(precise_root)
        self.media = MediaChains()

    def apply_events(self, endpoint: EndpointId, dp_rank: int, events: Iterable[KvEvent]) -> None:
        """Follow the events of one rank, in order. Their number is the caller's to bound."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(endpoint, dp_rank, event)
            elif isinstance(event, BlockRemoved):
                self._removed((endpoint, dp_rank, event.group or 0), event)
            else:
                self.clear_rank(endpoint, dp_rank, spare_store=True)

    def clear_rank(self, endpoint: EndpointId, dp_rank: int, *, spare_store: bool = False) -> None:
        """Clear the engine's rank on every tier; with `spare_store` the store behind it is kept: it is not the engine's
        to clear, and does not announce its entries again."""
        for source in [each for each in self._tables if each[:2] == (endpoint, dp_rank)]:
            if source[2] != _STORE or not spare_store:
                self._retire(source)
        self._retire_layers((endpoint, dp_rank))

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Remove an endpoint that left, or whose event stream cannot be trusted any more."""
        for source in [each for each in self._tables if each[0] == endpoint]:
            self._retire(source)
        for rank in [each for each in self._layers if each[0] == endpoint]:
            self._retire_layers(rank)

    def sweep_rows(self, rows: int = STEP_ROWS) -> bool:
        """Drop at most this many rows of retired sources; True when nothing is left to sweep."""
        while self._swept and rows > 0:
            rows = self._swept[0].sweep_rows(rows)
            if rows > 0:
                self._swept.popleft()
        return not self._swept

    @property
    def block_sizes(self) -> frozenset[int]:
        """Block sizes in use; a lookup needs the prompt hashed in each."""
        return frozenset(self._sizes)

    def count_rows(self, endpoint: EndpointId) -> int:
        """Blocks kept for the endpoint, over ranks and groups."""
        return sum(len(table) for source, table in self._tables.items() if source[0] == endpoint)

    def walk_tiers(self, endpoint: EndpointId) -> Iterator[tuple[Tier, int, int]]:
        """Tier, blocks and tokens of what the endpoint holds, in pieces."""
        for table in [table for source, table in self._tables.items() if source[0] == endpoint]:
            for bits, blocks in table.walk_tiers() if len(self._kinds) > 1 else [(1, len(table))]:
                on = [tier for number, tier in enumerate(self._kinds) if bits >> number & 1]
                yield from ((tier, blocks, blocks * table.block_size) for tier in on)

    def step_tokens(self, endpoint: EndpointId) -> int:
        """Return the step in tokens in which the endpoint reuses, by the blocks of all its groups; 1 if unknown."""
        sizes = [1]
        for (name, dp_rank, group), table in self._tables.items():
            if name == endpoint and group != _STORE:
                size = table.block_size
                layers = self._layers.get((name, dp_rank))
                sizes.append(size if layers is None else layers.step_tokens(size))
        return lcm(*sizes)

    def lacks_prefixes(self, endpoint: EndpointId, dp_rank: int) -> bool:
        """Return True if the rank announces only blocks that make no prefix, so that its events do not describe its
        cache."""
        rank = endpoint, dp_rank
        return rank in self._layers and not any(source[:2] == rank and source[2] != _STORE for source in self._tables)

    def match_prompt(self, hashes_at: Callable[[int], array[int]]) -> dict[EndpointId, PreciseMatch]:
        """Return the match of each endpoint that holds anything. `hashes_at(block_size)` gives the prompt's token
        blocks, chained from `precise_root`.
        """
        if self._asked is None:
            self._asked = self._to_ask()
            self._beginnings = self._follow_beginnings(self._asked)
        if self._beginnings is not None:
            return self._beginnings.match_prompt(hashes_at(self._asked[0][2]))
        found: dict[EndpointId, PreciseMatch] = {}
        several: dict[_Rank, PreciseMatch] = {}  # the least over groups
        stored: dict[_Rank, PreciseMatch] = {}  # by the stores behind them
        hashed: dict[int, array[int]] = {}
        shared: PreciseMatch | None = None  # by neighbours that hold as much: of a large fleet most do
        parting = 0
        for source, table, size, match, alone in self._asked:
            hashes = hashed.get(size)
            if hashes is None:
                hashes = hashed[size] = hashes_at(size)
            device, total, parting = match(hashes, parting)
            if not total and alone:
                continue
            if total > device:
                here = PreciseMatch(device * size, self._lower(table, hashes, device, total), source[1])
            elif shared is not None and shared.device_tokens == device * size and shared.dp_rank == source[1]:
                here = shared
            else:
                here = shared = PreciseMatch(device * size, (), source[1])
            if alone:
                found[source[0]] = here
            elif source[2] == _STORE:
                stored[source[:2]] = here
            else:
                least = several.get(source[:2])
                several[source[:2]] = here if least is None else _shorter(here, least)
        for rank in several.keys() | stored.keys() if stored else several:
            here = _with_store(several.get(rank), stored.get(rank), rank[1])
            best = found.get(rank[0])
            if here.tokens and (best is None or here.is_better(best)):
                found[rank[0]] = here
        return found

    def match_store(self, hashes_at: Callable[[int], array[int]]) -> int:
        """Leading tokens that an engine reported in a store which several of them read."""
        bits = sum([1 << bit for bit, kind in enumerate(self._kinds) if kind is Tier.SHARED])
        hashes_at = cache(hashes_at)
        tables = self._tables.values() if bits else ()
        return max([one.block_size * one.leading_on(hashes_at(one.block_size), bits) for one in tables], default=0)

    def _stored(self, endpoint: EndpointId, dp_rank: int, event: BlockStored) -> None:
        if event.spec_kind not in WHOLE_PREFIX:
            self.counts.other_groups += 1
            self._stored_layers((endpoint, dp_rank), event)
            return
        tier = self._tiers.get(event.medium)
        if tier is None:
            tier = self._tier(event.medium)
        if tier is None or not event.uniform or (event.extra is not None and len(event.extra) != event.blocks):
            self.counts.malformed += 1
            return
        source = endpoint, dp_rank, event.group or 0
        table = self._tables.get(source)
        if tier and table is not None and table.block_size != event.block_tokens:
            source = endpoint, dp_rank, _STORE
            table = self._tables.get(source)
        if table is None or table.block_size != event.block_tokens:
            if table is not None and (
                event.blocks == 1 and event.parent is not None and event.block_tokens < table.block_size
            ):  # the rest of a node, and not the first block of an engine that uses other blocks now
                self.counts.short_pages += 1
                return
            table = self._begin(source, event.block_tokens)
            if table is None:
                self.counts.over_bound += event.blocks
                return
        if self._beginnings is not None:
            self._beginnings.note_change(endpoint)
        self._place(endpoint, table, event, tier)
        if self._swept:
            self.sweep_rows()

    def _stored_layers(self, rank: _Rank, event: BlockStored) -> None:
        """Store blocks of a group that makes no prefix. Those on lower tiers are left out, which only lowers the
        estimate."""
        kind = LayerKind.of(event)
        if kind is None or self._tier(event.medium) != 0:
            return
        layers = self._layers.get(rank)
        if layers is None:
            if len(self._layers) >= self._max_sources:
                self.counts.over_bound += event.blocks
                return
            layers = self._layers[rank] = LayerGroups()
            self._asked = None
        group, former = layers.follow_event(event.group or 0, kind)
        if former is not None:
            self._swept.append(former)
        left_out = event.blocks if group is None else group.store(keys_of(event.block_hashes), self._max_blocks)
        self.counts.over_bound += left_out

    def _removed_layers(self, group: LayerGroup, event: BlockRemoved) -> None:
        removed = sum(group.remove(key) for key in keys_of(event.block_hashes)) if event.medium == "GPU" else 0
        self.counts.removed += removed
        self.counts.removed_unknown += event.blocks - removed

    def _removed(self, source: _Source, event: BlockRemoved) -> None:
        layers = self._layers.get(source[:2])
        if layers is not None and (group := layers.find(source[2])) is not None:
            self._removed_layers(group, event)
            return
        table = self._tables.get(source)
        tier = self._tier(event.medium)
        if table is None or tier is None:
            self.counts.removed_unknown += event.blocks
            return
        if self._beginnings is not None:
            self._beginnings.note_change(source[0])
        store = self._tables.get((*source[:2], _STORE)) if tier else None
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
            if event.extra is not None or event.wide or self.media.noted:
                self._note_media(endpoint, table, event, tier, blocks, seed)
            return
        different = set(keys)
        if len(different) != len(keys) or parent in different:  # a block twice, or below itself
            self.counts.malformed += 1
            return
        stored = table.store_blocks(keys, blocks, parent, tier)
        self.counts.stored += stored
        self.counts.over_bound += len(keys) - stored
        if stored == len(keys):
            self._note_media(endpoint, table, event, tier, blocks, seed)

    def _note_media(
        self, endpoint: EndpointId, table: BlockTable, event: BlockStored, tier: int, blocks: array[int], seed: int
    ) -> None:
        """Note the media in an event of an engine's own memory, below this block."""
        if tier:
            return

        def find_front() -> array[int] | None:
            if event.parent is None:
                return array("Q")
            place = table.find_place(key_of(event.parent))
            return None if place is None else table.walk_up(place)

        self.media.note_stored(endpoint, event, blocks, parent=seed, find_front=find_front)

    def _to_ask(self) -> list[_Asked]:
        """Return what a lookup needs of each source, worked out when one came or left."""
        sources = Counter(endpoint for endpoint, _, _ in self._tables)
        return [
            (source, table, table.block_size, self._match_of(source, table), sources[source[0]] == 1)
            for source, table in self._tables.items()
        ]

    def _follow_beginnings(self, asked: Sequence[_Asked]) -> Beginnings | None:
        """Return the kept beginnings of many sources that are one for each endpoint and alike."""
        ranks = {source[1] for source, *_ in asked}
        alike = len(self._sizes) == len(ranks) == 1 and not self._layers and all(alone for *_, alone in asked)
        if not alike or len(asked) < self._many_sources:
            return None
        tables = {source[0]: table for source, table, *_ in asked}
        (rank,) = ranks

        def make_match(endpoint: EndpointId, hashes: array[int], device: int, total: int) -> PreciseMatch:
            table = tables[endpoint]
            lower = self._lower(table, hashes, device, total) if total > device else ()
            return PreciseMatch(device * table.block_size, lower, rank)

        return Beginnings(tables, make_match, many=self._many_sources)

    def _match_of(self, source: _Source, table: BlockTable) -> _Match:
        layers = None if source[2] == _STORE else self._layers.get(source[:2])
        return table.match if layers is None else partial(_match_layers, table, layers)

    def _begin(self, source: _Source, block_size: int) -> BlockTable | None:
        """Follow a source from nothing; None when there are too many."""
        if source in self._tables:  # the engine was restarted with another block size
            self._retire(source)
        if len(self._tables) + len(self._swept) >= self._max_sources:
            return None
        table = BlockTable(block_size, max_rows=self._max_blocks, max_ghosts=self._max_ghosts)
        self._tables[source] = table
        self._asked = None
        self._sizes[block_size] += 1
        return table

    def _retire(self, source: _Source) -> None:
        table = self._tables.pop(source)
        self._asked = None
        self._sizes[table.block_size] -= 1
        if not self._sizes[table.block_size]:
            del self._sizes[table.block_size]
        self._swept.append(table)
        self.sweep_rows()

    def _retire_layers(self, rank: _Rank) -> None:
        if rank in self._layers:
            self._swept.extend(self._layers.pop(rank))
            self._asked = None

    def _tier(self, medium: str | None) -> int | None:
        """Index of the medium's tier, made on first sight; None beyond the bound."""
        name = "GPU" if medium == "GPU" or not medium else medium.upper()
        tier = self._tiers.get(name)
        if tier is None and len(self._tiers) < MAX_TIERS:
            tier = self._tiers[name] = len(self._tiers)
            self._kinds.append(TIER_OF.get(name, Tier.HOST))
        return tier

    def _lower(self, table: BlockTable, hashes: array[int], device: int, total: int) -> LowerTokens:
        """Return the blocks from `device` up to `total` by the nearest tier that each is on, in tokens."""
        counts: Counter[Tier] = Counter()
        for tiers, blocks in table.count_tiers(hashes, device, total).items():
            kinds = {kind for bit, kind in enumerate(self._kinds) if bit and tiers >> bit & 1}
            counts[next((tier for tier in Tier if tier in kinds), Tier.HOST)] += blocks
        return tuple([(tier, counts[tier] * table.block_size) for tier in Tier if counts[tier]])


def _match_layers(table: BlockTable, layers: LayerGroups, hashes: array[int], guess: int) -> tuple[int, int, int]:
    """`BlockTable.match`, as far as the other layers of the model go along."""
    device, total, guess = table.match(hashes, guess)
    reusable = layers.reusable_blocks(table.leading_keys(hashes, total), table.block_size)
    return min(device, reusable), reusable, guess


def _shorter(a: PreciseMatch, b: PreciseMatch) -> PreciseMatch:
    """Return what two groups of one rank have in common."""
    tokens = min(a.tokens, b.tokens)
    device = min(a.device_tokens, b.device_tokens)
    far = max((tier for tier, _ in (*a.lower, *b.lower)), key=list(Tier).index, default=Tier.HOST)
    return PreciseMatch(device, ((far, tokens - device),) if tokens > device else (), a.dp_rank)


def _with_store(own: PreciseMatch | None, store: PreciseMatch | None, dp_rank: int) -> PreciseMatch:
    """Return a rank's match, which goes on in the store behind it where that reaches further."""
    own = PreciseMatch(0, (), dp_rank) if own is None else own
    if store is None or store.tokens <= own.tokens:
        return own
    return PreciseMatch(own.device_tokens, skip_lower(store.lower, own.device_tokens), dp_rank)


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
