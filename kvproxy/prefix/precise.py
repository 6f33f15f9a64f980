"""The precise index: follows the engines' KV events, block by block and tier by tier.

Blocks are named by our own chained hash over the event's tokens, so no engine has to agree with us on a hash.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvproxy.clients.kv_events.events import FULL_ATTENTION, BlockRemoved, BlockStored, EngineHash, KvEvent
from kvproxy.prefix.block_table import MAX_TIERS, BlockTable
from kvproxy.prefix.hashing import mix_keys, root_seed, token_blocks
from kvproxy.prefix.orphans import Orphan, Orphans
from kvproxy.prefix.prefix_match import match
from kvproxy.types import EndpointId

#: Rows of sources that were cleared or left, given up per operation.
STEP_ROWS = 1024

#: Adapters whose chains were begun of late.
_REMEMBERED_ROOTS = 1024

_U64 = 2**64 - 1


class PreciseMatch(NamedTuple):
    """Leading tokens one endpoint holds: in engine memory, then further ones on lower tiers; on its best rank."""

    device_tokens: int
    lower_tokens: int
    dp_rank: int

    @property
    def tokens(self) -> int:
        """Contiguous tokens over all tiers."""
        return self.device_tokens + self.lower_tokens


@dataclass(slots=True)
class PreciseCounts:
    """What became of events, in blocks (`malformed` and `other_groups`: events)."""

    stored: int = 0
    removed: int = 0
    removed_unknown: int = 0
    orphaned: int = 0
    adopted: int = 0
    orphans_dropped: int = 0
    over_bound: int = 0
    malformed: int = 0
    other_groups: int = 0


_Source = tuple[EndpointId, int, int]  # endpoint, data-parallel rank, KV cache group


class _Followed(NamedTuple):
    """What is known of one source."""

    table: BlockTable
    orphans: Orphans


class PreciseIndex:
    """Bounded by `max_blocks` rows a source (endpoint, data-parallel rank, KV cache group) and `max_sources`."""

    def __init__(
        self, *, max_blocks: int = 4_000_000, max_orphan_blocks: int = 16_384, max_ghosts: int = 16_384,
        max_sources: int = 4096,
    ) -> None:  # fmt: skip
        self.counts = PreciseCounts()
        self._max_blocks = max_blocks
        self._max_orphan_blocks = max_orphan_blocks
        self._max_ghosts = max_ghosts
        self._max_sources = max_sources
        self._tiers = {"GPU": 0}  # by medium; 0 is the engine's own memory
        self._followed: dict[_Source, _Followed] = {}
        self._tables: dict[EndpointId, dict[int, list[BlockTable]]] = {}  # the same, by rank; one a group
        self._sizes: Counter[int] = Counter()  # sources by block size
        self._swept: deque[BlockTable] = deque()
        self._root = lru_cache(_REMEMBERED_ROOTS)(precise_root)

    # events

    def apply(self, endpoint: EndpointId, dp_rank: int, events: Iterable[KvEvent]) -> None:
        """Follow the events of one rank, in order. Their number is the caller's to bound."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(endpoint, dp_rank, event)
            elif isinstance(event, BlockRemoved):
                self._removed((endpoint, dp_rank, event.group or 0), event)
            else:
                self.cleared(endpoint, dp_rank)

    def cleared(self, endpoint: EndpointId, dp_rank: int) -> None:
        """The engine's rank holds nothing any more, on any tier."""
        for source in [each for each in self._followed if each[:2] == (endpoint, dp_rank)]:
            self._retire(source)

    def remove(self, endpoint: EndpointId) -> None:
        """The endpoint left, or its event stream cannot be trusted any more."""
        for source in [each for each in self._followed if each[0] == endpoint]:
            self._retire(source)

    def sweep(self, rows: int = STEP_ROWS) -> bool:
        """Give up at most so many rows of retired sources; True when nothing is left to sweep."""
        while self._swept and rows > 0:
            before = len(self._swept[0])
            left = self._swept[0].sweep(rows)
            rows -= max(1, before - left)
            if not left:
                self._swept.popleft()
        return not self._swept

    # what is known

    @property
    def block_sizes(self) -> frozenset[int]:
        """Block sizes in use; a lookup needs the prompt hashed in each."""
        return frozenset(self._sizes)

    @property
    def orphan_blocks(self) -> int:
        """Blocks parked until their parent comes."""
        return sum(len(each.orphans) for each in self._followed.values())

    def rows(self, endpoint: EndpointId) -> int:
        """Blocks kept for the endpoint, over ranks and groups."""
        return sum(len(each.table) for source, each in self._followed.items() if source[0] == endpoint)

    def lookup(self, hashes_at: Callable[[int], array[int]]) -> dict[EndpointId, PreciseMatch]:
        """The match of each endpoint that holds anything. `hashes_at(block_size)` gives the prompt's token blocks,
        chained from `precise_root`.
        """
        hashed: dict[int, array[int]] = {}
        parting = 0
        found: dict[EndpointId, PreciseMatch] = {}
        for endpoint, ranks in self._tables.items():
            most, most_device, best = 0, 0, 0
            for dp_rank, tables in ranks.items():
                total = device = -1
                for table in tables:
                    size = table.block_size
                    hashes = hashed.get(size)
                    if hashes is None:
                        hashes = hashed[size] = hashes_at(size)
                    on_device, on_any, parting = match(table.firsts, hashes, parting)
                    if total < 0 or on_any * size < total:
                        total = on_any * size
                    if device < 0 or on_device * size < device:
                        device = on_device * size
                if total > most or (total == most and (device, -dp_rank) > (most_device, -best)):
                    most, most_device, best = total, device, dp_rank
            if most:
                found[endpoint] = PreciseMatch(most_device, most - most_device, best)
        return found

    # how

    def _stored(self, endpoint: EndpointId, dp_rank: int, event: BlockStored) -> None:
        if event.spec_kind is not None and event.spec_kind != FULL_ATTENTION:
            self.counts.other_groups += 1
            return
        tier = self._tiers.get(event.medium)
        if tier is None:
            tier = self._tier(event.medium)
        if tier is None or not event.uniform or (event.extra is not None and len(event.extra) != event.blocks):
            self.counts.malformed += 1
            return
        source = endpoint, dp_rank, event.group or 0
        followed = self._followed.get(source)
        if followed is None or followed.table.block_size != event.block_tokens:
            followed = self._begin(source, event.block_tokens)
            if followed is None:
                self.counts.over_bound += event.blocks
                return
        run = _parkable(event, tier)
        if self._place(followed, run) and followed.orphans:
            self._adopt(followed, run)
        if self._swept:
            self.sweep()

    def _removed(self, source: _Source, event: BlockRemoved) -> None:
        followed, tier = self._followed.get(source), self._tier(event.medium)
        if followed is None or tier is None:
            self.counts.removed_unknown += event.blocks
            return
        table, orphans = followed
        for each in event.block_hashes:
            key = _key(each)
            if table.remove(key, tier) or (len(orphans) and orphans.remove(key, tier)):
                self.counts.removed += 1
            else:
                self.counts.removed_unknown += 1

    def _place(self, followed: _Followed, run: Orphan) -> bool:
        """Store the run, or park it; False when it is malformed or was parked."""
        table, orphans = followed
        size, above = table.block_size, None
        seed: int | None
        if run.parent is None:
            seed = self._root(size, lora=run.lora)
        else:
            above = table.place(run.parent)
            seed = table.former(run.parent) if above is None else above[0].blocks[above[1]]
        blocks = None if seed is None else _chain(run, size, seed)
        placed = run.parent is None or above is not None
        if blocks is not None and placed and table.store_new(run.keys, blocks, above, run.tier):
            self.counts.stored += len(blocks)
            return True
        names = set(run.keys)
        if len(names) != len(run.keys) or run.parent in names:  # a block twice, or below itself
            self.counts.malformed += 1
            return False
        if blocks is None:
            self.counts.orphaned += len(run.keys)
            self.counts.orphans_dropped += orphans.park(run)
            return False
        stored = table.store(run.keys, blocks, run.parent, run.tier)
        self.counts.stored += stored
        self.counts.over_bound += len(run.keys) - stored
        return True

    def _adopt(self, followed: _Followed, run: Orphan) -> None:
        """Store the runs that waited for a block of this one, and those that waited for them."""
        todo = followed.orphans.claim(run.keys)
        while todo:
            run = todo.pop()
            self.counts.adopted += len(run.keys)
            if self._place(followed, run):
                todo += followed.orphans.claim(run.keys)

    def _begin(self, source: _Source, block_size: int) -> _Followed | None:
        """Follow a source anew; None when there are too many."""
        if source in self._followed:  # the engine was restarted with another block size
            self._retire(source)
        if len(self._followed) + len(self._swept) >= self._max_sources:
            return None
        table = BlockTable(block_size, max_rows=self._max_blocks, max_ghosts=self._max_ghosts)
        followed = _Followed(table, Orphans(max_blocks=self._max_orphan_blocks))
        self._followed[source] = followed
        self._tables.setdefault(source[0], {}).setdefault(source[1], []).append(table)
        self._sizes[block_size] += 1
        return followed

    def _retire(self, source: _Source) -> None:
        table = self._followed.pop(source).table
        endpoint, dp_rank, _ = source
        ranks = self._tables[endpoint]
        ranks[dp_rank].remove(table)
        if not ranks[dp_rank]:
            del ranks[dp_rank]
        if not ranks:
            del self._tables[endpoint]
        self._sizes[table.block_size] -= 1
        if not self._sizes[table.block_size]:
            del self._sizes[table.block_size]
        self._swept.append(table)
        self.sweep()

    def _tier(self, medium: str | None) -> int | None:
        """Index of the medium's tier, made on first sight; None beyond the bound."""
        name = "GPU" if medium == "GPU" or not medium else medium.upper()
        tier = self._tiers.get(name)
        if tier is None and len(self._tiers) < MAX_TIERS:
            tier = self._tiers[name] = len(self._tiers)
        return tier


def precise_root(block_size: int, *, lora: str = "", cache_salt: str | None = None) -> int:
    """Where a prompt's chain starts, so that it meets the blocks engines report for it."""
    return root_seed(block_size=block_size, lora=lora, cache_salt=cache_salt)


def _key(engine_hash: EngineHash) -> int:
    """Engines publish 64-bit integers (old ones signed) or whole digests."""
    return engine_hash & _U64 if isinstance(engine_hash, int) else xxh3_64_intdigest(engine_hash)


def _keys(engine_hashes: Sequence[EngineHash]) -> array[int]:
    try:
        return array("Q", engine_hashes)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return array("Q", [_key(each) for each in engine_hashes])


def _parkable(event: BlockStored, tier: int) -> Orphan:
    parent = None if event.parent is None else _key(event.parent)
    lora = event.lora_name or (f"lora_id {event.lora_id}" if event.lora_id is not None else "")
    return Orphan(parent, _keys(event.block_hashes), event.token_ids, event.extra, lora, tier)


def _chain(run: Orphan, block_size: int, seed: int) -> array[int]:
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
