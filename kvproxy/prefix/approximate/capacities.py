"""The capacities of an approximate index, as reported and as learned."""

from __future__ import annotations

from kvproxy.prefix.approximate.capacity import LearnedCapacity
from kvproxy.prefix.approximate.endpoint_lru import SpeculativeEntry
from kvproxy.prefix.approximate.index import ApproximateIndex
from kvproxy.types import EndpointId

#: An index this full has forgotten something its endpoint was asked for.
_FULL = 0.9


class Capacities:
    """Sizes the index. Without `learning` an endpoint's capacity is what was reported."""

    def __init__(self, index: ApproximateIndex, *, learning: bool = True) -> None:
        self.learning = learning
        self._index = index
        self._learned: dict[EndpointId, LearnedCapacity] = {}  # no more than the index has endpoints

    def set_reported(self, endpoint: EndpointId, blocks: int) -> None:
        """The endpoint's capacity as its engine's metrics say."""
        known = self._known(endpoint)
        known.set_reported(blocks)
        self._index.set_capacity(endpoint, known.blocks)

    def observe(self, entry: SpeculativeEntry, reused_blocks: int) -> bool:
        """The response to this entry's request reused so many leading blocks; before the entry is settled. True: the
        engine lost what it held, and so did the index."""
        lru = entry.lru
        if not self.learning or lru is None or not lru.capacity:  # settled, void, or nothing to learn
            return False
        endpoint = entry.endpoint
        known = self._learned.get(endpoint) or self._known(endpoint)
        held = len(entry.hashes) - entry.new_blocks
        full = reused_blocks > held and lru.blocks >= _FULL * lru.capacity
        before = known.blocks
        lost = known.observe(age_blocks=entry.age_blocks, known_blocks=held, reused_blocks=reused_blocks, full=full)
        if known.blocks != before:
            self._index.set_capacity(endpoint, known.blocks)
        if lost:
            self._index.clear(endpoint)
        return lost

    def reported(self, endpoint: EndpointId) -> int:
        """Blocks the endpoint has room for by what its engine reported."""
        known = self._learned.get(endpoint)
        return self._index.capacity(endpoint) if known is None else known.reported

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left, or is another engine now."""
        self._learned.pop(endpoint, None)

    def _known(self, endpoint: EndpointId) -> LearnedCapacity:
        known = self._learned.get(endpoint)
        if known is None:
            known = self._learned[endpoint] = LearnedCapacity(self._index.capacity(endpoint))
        return known
