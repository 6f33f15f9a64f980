"""Tables of blocks of all sources of one cluster, within bounds: begun, retired and swept."""

from __future__ import annotations

from collections import Counter, deque
from math import lcm

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.layer_groups import LayerGroup, LayerGroups

#: Rows of sources that were cleared or left, dropped per operation.
STEP_ROWS = 1024

Rank = tuple[EndpointId, int]
Source = tuple[EndpointId, int, int]  # endpoint, data-parallel rank, KV cache group (or STORE)
STORE = -1  # blocks of another size than the engine's, on lower tiers only


class SourceTables:
    """Bounded by `max_rows` blocks a source and `max_sources`."""

    def __init__(self, *, max_rows: int, max_ghosts: int, max_sources: int) -> None:
        self.by_source: dict[Source, BlockTable] = {}
        self.layers: dict[Rank, LayerGroups] = {}  # of hybrid models
        self.sizes: Counter[int] = Counter()  # sources by block size
        self.changes = 0  # sources that came or left
        self.swept: deque[BlockTable | LayerGroup] = deque()
        self.max_rows = max_rows
        self._max_ghosts = max_ghosts
        self._max_sources = max_sources

    def begin(self, source: Source, block_size: int) -> BlockTable | None:
        """Follow a source from nothing; None when there are too many."""
        if source in self.by_source:  # the engine was restarted with another block size
            self._retire(source)
        if len(self.by_source) + len(self.swept) >= self._max_sources:
            return None
        table = BlockTable(block_size, max_rows=self.max_rows, max_ghosts=self._max_ghosts)
        self.by_source[source] = table
        self.sizes[block_size] += 1
        self.changes += 1
        return table

    def enter_layers(self, rank: Rank) -> LayerGroups | None:
        """Return the rank's other layers, made where there are none; None when there are too many."""
        layers = self.layers.get(rank)
        if layers is None and len(self.layers) < self._max_sources:
            layers = self.layers[rank] = LayerGroups()
            self.changes += 1
        return layers

    def clear_rank(self, endpoint: EndpointId, dp_rank: int, *, spare_store: bool = False) -> None:
        """Clear the engine's rank on every tier; with `spare_store` the store behind it is kept: it is not the engine's
        to clear, and does not announce its entries again."""
        for source in [each for each in self.by_source if each[:2] == (endpoint, dp_rank)]:
            if source[2] != STORE or not spare_store:
                self._retire(source)
        self._retire_layers((endpoint, dp_rank))

    def remove_endpoint(self, endpoint: EndpointId) -> None:
        """Remove an endpoint that left, or whose event stream cannot be trusted any more."""
        for source in [each for each in self.by_source if each[0] == endpoint]:
            self._retire(source)
        for rank in [each for each in self.layers if each[0] == endpoint]:
            self._retire_layers(rank)

    def sweep_rows(self, rows: int = STEP_ROWS) -> bool:
        """Drop at most this many rows of retired sources; True when nothing is left to sweep."""
        while self.swept and rows > 0:
            rows = self.swept[0].sweep_rows(rows)
            if rows > 0:
                self.swept.popleft()
        return not self.swept

    def count_rows(self, endpoint: EndpointId) -> int:
        """Blocks kept for the endpoint, over ranks and groups."""
        return sum(len(table) for source, table in self.by_source.items() if source[0] == endpoint)

    def step_tokens(self, endpoint: EndpointId) -> int:
        """Return the step in tokens in which the endpoint reuses, by the blocks of all its groups; 1 if unknown."""
        sizes = [1]
        for (name, dp_rank, group), table in self.by_source.items():
            if name == endpoint and group != STORE:
                size = table.block_size
                layers = self.layers.get((name, dp_rank))
                sizes.append(size if layers is None else layers.step_tokens(size))
        return lcm(*sizes)

    def lacks_prefixes(self, endpoint: EndpointId, dp_rank: int) -> bool:
        """Return True if the rank announces only blocks that make no prefix, so that its events do not describe its
        cache."""
        rank = endpoint, dp_rank
        return rank in self.layers and not any(source[:2] == rank and source[2] != STORE for source in self.by_source)

    def _retire(self, source: Source) -> None:
        table = self.by_source.pop(source)
        self.changes += 1
        self.sizes[table.block_size] -= 1
        if not self.sizes[table.block_size]:
            del self.sizes[table.block_size]
        self.swept.append(table)
        self.sweep_rows()

    def _retire_layers(self, rank: Rank) -> None:
        if rank in self.layers:
            self.swept.extend(self.layers.pop(rank))
            self.changes += 1
