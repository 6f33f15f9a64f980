"""Matches of a prompt with the blocks of all sources: the best of each endpoint's ranks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial

from kvproxy.base.types import EndpointId, Tier, skip_lower
from kvproxy.cache.indexes.beginnings import Beginnings, PreciseMatch
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.layer_groups import LayerGroups
from kvproxy.cache.indexes.medium_tiers import MediumTiers
from kvproxy.cache.indexes.run_matches import leading_keys, leading_on
from kvproxy.cache.indexes.source_tables import STORE, Rank, Source, SourceTables

#: Leading blocks on the device and on any tier, and a guess for the next source, by hashes and such a guess.
_Match = Callable[["array[int]", int], tuple[int, int, int]]
#: A source, its table, that table's block size and `match`, and whether its endpoint has no other source.
_Asked = tuple[Source, BlockTable, int, _Match, bool]


class PromptMatcher:
    """From `many` sources on, what they hold of common beginnings is kept."""

    def __init__(self, tables: SourceTables, tiers: MediumTiers, *, many: int) -> None:
        #: Of a fleet of alike sources; None: every prompt asks each source.
        self.beginnings: Beginnings | None = None
        self._tables = tables
        self._tiers = tiers
        self._many = many
        self._asked: Sequence[_Asked] = ()
        self._changes = -1  # of the tables, when these were worked out

    def match_prompt(self, hashes_at: Callable[[int], array[int]]) -> dict[EndpointId, PreciseMatch]:
        """Return the match of each endpoint that holds anything. `hashes_at(block_size)` gives the prompt's token
        blocks, chained from `precise_root`.
        """
        if self._changes != self._tables.changes:
            self._changes = self._tables.changes
            self._asked = self._to_ask()
            self.beginnings = self._follow_beginnings(self._asked)
        if self.beginnings is not None:
            return self.beginnings.match_prompt(hashes_at(self._asked[0][2]))
        found: dict[EndpointId, PreciseMatch] = {}
        several: dict[Rank, PreciseMatch] = {}  # the least over groups
        stored: dict[Rank, PreciseMatch] = {}  # by the stores behind them
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
                lower = self._tiers.count_lower(table, hashes, device, total)
                here = PreciseMatch(device * size, lower, source[1])
            elif shared is not None and shared.device_tokens == device * size and shared.dp_rank == source[1]:
                here = shared
            else:
                here = shared = PreciseMatch(device * size, (), source[1])
            if alone:
                found[source[0]] = here
            elif source[2] == STORE:
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
        bits = sum([1 << bit for bit, kind in enumerate(self._tiers.kinds) if kind is Tier.SHARED])
        hashes_at = cache(hashes_at)
        tables = self._tables.by_source.values() if bits else ()
        lengths = [one.block_size * leading_on(one.firsts, hashes_at(one.block_size), bits) for one in tables]
        return max(lengths, default=0)

    def _to_ask(self) -> list[_Asked]:
        """Return what a lookup needs of each source, worked out when one came or left."""
        by_source = self._tables.by_source
        sources = Counter(endpoint for endpoint, _, _ in by_source)
        return [
            (source, table, table.block_size, self._match_of(source, table), sources[source[0]] == 1)
            for source, table in by_source.items()
        ]

    def _match_of(self, source: Source, table: BlockTable) -> _Match:
        layers = None if source[2] == STORE else self._tables.layers.get(source[:2])
        return table.match if layers is None else partial(_match_layers, table, layers)

    def _follow_beginnings(self, asked: Sequence[_Asked]) -> Beginnings | None:
        """Return the kept beginnings of many sources that are one for each endpoint and alike."""
        ranks = {source[1] for source, *_ in asked}
        layered = bool(self._tables.layers)
        alike = len(self._tables.sizes) == len(ranks) == 1 and not layered and all(alone for *_, alone in asked)
        if not alike or len(asked) < self._many:
            return None
        tables = {source[0]: table for source, table, *_ in asked}
        (rank,) = ranks
        count_lower = self._tiers.count_lower

        def make_match(endpoint: EndpointId, hashes: array[int], device: int, total: int) -> PreciseMatch:
            table = tables[endpoint]
            lower = count_lower(table, hashes, device, total) if total > device else ()
            return PreciseMatch(device * table.block_size, lower, rank)

        return Beginnings(tables, make_match, many=self._many)


def _match_layers(table: BlockTable, layers: LayerGroups, hashes: array[int], guess: int) -> tuple[int, int, int]:
    """`BlockTable.match`, as far as the other layers of the model go along."""
    device, total, guess = table.match(hashes, guess)
    reusable = layers.reusable_blocks(leading_keys(table.firsts, hashes, total), table.block_size)
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
