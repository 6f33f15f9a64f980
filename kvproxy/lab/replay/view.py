"""Router's view of the engines' caches in a replay: the proxy's own sources and merge, fed as the proxy does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from random import Random

import msgspec

from kvproxy.base.types import EndpointId, cut_lower
from kvproxy.cache.indexes import block_events as wire
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Run
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts
from kvproxy.lab.replay.settings import IndexMode, ReplayFleet
from kvproxy.lab.replay.trace import Turn
from kvproxy.lab.simulator.engine_io import BlockRemoved, BlockStored, KvEvent

#: Takes the tokens a response was predicted to find cached, and those it did.
Settle = Callable[[int, int], None]

#: A trace names blocks, not text or tokens: for the sources each of its blocks is one token, its id, and one block of
#: text; their answers are in blocks.
_BLOCK_TOKENS = 1
_BYTES_PER_TOKEN = float(TEXT_BLOCK_BYTES)


class CacheView:
    """Where the facts of a pick come from; this one looks for no prefixes. Endpoints are numbered."""

    def facts(self, turn: Turn) -> OverlapFacts:
        """Return what is known about this prompt now."""
        return OverlapFacts(turn.prompt_tokens)

    def routed(self, endpoint: int, turn: Turn) -> Settle:
        """Record where the request of those facts goes; the result is called once, when its response came."""
        return lambda predicted, cached: None

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        """Learn from KV events of one endpoint."""

    def forget(self, endpoint: int) -> None:
        """Forget an endpoint that left; another may come in its place."""


class IndexView(CacheView):
    """View by a proxy's own sources. In `events` mode the precise index follows every engine without a gap; in
    `approximate` mode it has only routed requests and the engines' capacity. `tier_blind`: events of lower tiers are
    ignored."""

    def __init__(self, fleet: ReplayFleet, block_size: int, *, rng: Random, tier_blind: bool = False) -> None:
        self._block_size = block_size
        self._ids = [endpoint_id(index) for index in range(fleet.instances)]
        self._events = fleet.index is IndexMode.EVENTS
        self._tier_blind = tier_blind
        self._misleading = "GPU" if fleet.tiers is None else "CPU"  # tier of false entries
        capacity_blocks = int(fleet.capacity_tokens * fleet.index_capacity) // block_size
        state = IndexState(endpoints=fleet.instances, capacity_blocks=capacity_blocks)
        self.local = LocalIndexes(state, FollowedEvents() if self._events else None)
        self.local.capacities.learning = fleet.learn_capacity
        if self._events:
            self.local.exact = frozenset(self._ids)
            self.local.store_readers = lambda: self._ids
        self._rng = rng
        self._asked: tuple[Turn, OverlapFacts, PrefixCursor[Run]] | None = (
            None  # by the latest `facts`: the pick follows in that step
        )
        self._false_entries = fleet.wrong_share / (1.0 - fleet.wrong_share)  # for each true one

    def facts(self, turn: Turn) -> OverlapFacts:
        blocks = turn.blocks
        cursor = self.local.approximate.locate(turn.blocks)
        limit = (turn.prompt_tokens - 1) // self._block_size  # the last token is always computed
        known = self.local.find_overlaps(
            cursor,
            bytes_per_token=_BYTES_PER_TOKEN,
            tokens=array("I", blocks) if self._events else None,
            cache_salt=None,
            prompt_tokens=len(blocks) if self._events else 0,
        )
        overlaps = {endpoint: self._in_tokens(overlap, limit) for endpoint, overlap in known.items()}
        hot_tokens = self.local.approximate.hot_blocks(cursor) * self._block_size
        facts = OverlapFacts(turn.prompt_tokens, overlaps, hot_tokens, turn.blocks, self._block_size)
        self._asked = turn, facts, cursor
        return facts

    def routed(self, endpoint: int, turn: Turn) -> Settle:
        assert self._asked is not None
        asked, facts, cursor = self._asked
        assert asked is turn
        if self._false_entries and self._rng.random() < self._false_entries:
            self._mislead(turn)
        name = self._ids[endpoint]
        return partial(self._settle, turn, facts.by_endpoint.get(name), self.local.route(name, cursor, facts))

    def _settle(
        self, turn: Turn, overlap: Overlap | None, entry: SpeculativeEntry, predicted: int, cached: int
    ) -> None:
        """As the proxy learns from a response."""
        local = self.local
        endpoint = entry.endpoint
        cached_blocks = cached // self._block_size
        lost = local.observe_capacity(entry, overlap, cached_tokens=cached, cached_blocks=cached_blocks)
        local.correct_prediction(
            endpoint,
            entry.cursor,
            overlap,
            predicted_tokens=predicted,
            cached_tokens=cached,
            cached_blocks=cached_blocks,
        )
        local.settle_entry(entry, prefilled=True, lost=lost, calls_tool=turn.calls_tool)

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        heard = [event for event in events if not self._tier_blind or _is_device(event)]
        self.local.precise.apply_events(self._ids[endpoint], 0, list(_on_the_wire(heard)))

    def forget(self, endpoint: int) -> None:
        self.local.forget_endpoint(self._ids[endpoint])
        self.local.precise.remove_endpoint(self._ids[endpoint])
        while not self.local.precise.sweep_rows():
            pass

    def _in_tokens(self, overlap: Overlap, limit: int) -> Overlap:
        """From blocks, of which at most `limit` can be reused."""
        device = min(overlap.device_tokens, limit)
        scale = self._block_size
        return msgspec.structs.replace(
            overlap,
            device_tokens=device * scale,
            lower=tuple([(tier, blocks * scale) for tier, blocks in cut_lower(overlap.lower, limit - device)]),
            claimed_tokens=min(overlap.claimed_tokens, limit) * scale,
            backed_tokens=min(overlap.backed_tokens, limit) * scale,
        )

    def _mislead(self, turn: Turn) -> None:
        """Insert a false entry for this prompt at a random endpoint."""
        endpoint = self._rng.choice(self._ids)
        if not self._events:
            self.local.approximate.insert(endpoint, self.local.approximate.locate(turn.blocks))
        elif turn.blocks:
            stored = BlockStored(tuple(turn.blocks), None, medium=self._misleading)
            self.local.precise.apply_events(endpoint, 0, list(_on_the_wire([stored])))


def endpoint_id(index: int) -> EndpointId:
    """Name of a simulated endpoint."""
    return EndpointId(f"e{index}")


def _on_the_wire(events: Sequence[KvEvent]) -> Iterator[wire.KvEvent]:
    """As engines send them: blocks that are removed one after the other in one event."""
    for kind, run in groupby(events, key=_kind):
        if kind is None:
            for event in run:
                yield _stored(event) if isinstance(event, BlockStored) else wire.AllBlocksCleared()
        else:
            hashes = tuple([event.block_hash for event in run if isinstance(event, BlockRemoved)])
            yield wire.BlockRemoved(hashes, medium=kind)


def _kind(event: KvEvent) -> str | None:
    return event.medium if isinstance(event, BlockRemoved) else None


def _stored(event: BlockStored) -> wire.BlockStored:
    hashes = array("I", event.block_hashes)
    return wire.BlockStored(event.block_hashes, event.parent, hashes, _BLOCK_TOKENS, medium=event.medium)


def _is_device(event: KvEvent) -> bool:
    return not isinstance(event, BlockStored | BlockRemoved) or event.medium == "GPU"
