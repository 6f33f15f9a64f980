"""What a router knows of the engines' caches in a replay: the proxy's own indexes, fed as the proxy feeds them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Protocol

from kvproxy.balancing.policy import FactSource, Overlap, OverlapFacts
from kvproxy.clients.kv_events import events as wire
from kvproxy.prefix.approximate import ApproximateIndex
from kvproxy.prefix.hashing import token_blocks
from kvproxy.prefix.holding import Claim
from kvproxy.prefix.hot_blocks import HotBlocks
from kvproxy.prefix.precise import PreciseIndex, precise_root
from kvproxy.replay.settings import FleetSettings, IndexMode
from kvproxy.replay.trace import Turn
from kvproxy.simulator.kv_event import BlockRemoved, BlockStored, KvEvent
from kvproxy.types import EndpointId

#: A trace names blocks, not tokens: to the precise index each block is one token, its id.
_BLOCK_TOKENS = 1


class CacheView(Protocol):
    """Where the facts of a pick come from. Endpoints are numbered."""

    def facts(self, turn: Turn) -> OverlapFacts:
        """What is known about this prompt now."""
        ...

    def routed(self, endpoint: int, turn: Turn) -> Claim:
        """The request went there."""
        ...

    def settled(self, endpoint: int, turn: Turn, claim: Claim, *, predicted: int, cached: int) -> None:
        """Its response came: so many tokens had been predicted, so many were cached."""
        ...

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        """KV events of one endpoint."""
        ...


class IndexView:
    """The indexes of a proxy. In `events` mode the precise index follows the engines and the approximate one holds what
    is in flight; in `approximate` mode it holds everything routed, with the engines' capacity.
    """

    def __init__(self, fleet: FleetSettings, block_size: int, *, rng: Random) -> None:
        self._block_size = block_size
        self._ids = [endpoint_id(index) for index in range(fleet.instances)]
        self._events = fleet.index is IndexMode.EVENTS
        capacity = int(fleet.capacity_tokens * fleet.index_capacity) // block_size
        self._routed = ApproximateIndex(capacity_blocks=10 * capacity if self._events else capacity)
        self._precise = PreciseIndex()
        self._root = precise_root(_BLOCK_TOKENS)
        self._hot = HotBlocks(endpoints=fleet.instances)
        self._rng = rng
        self._false_entries = fleet.wrong_share / (1.0 - fleet.wrong_share)  # for each true one

    def facts(self, turn: Turn) -> OverlapFacts:
        blocks, block_size = turn.blocks, self._block_size
        limit = (turn.prompt_tokens - 1) // block_size  # the last token is always computed
        matched: dict[EndpointId, tuple[int, FactSource]] = {
            endpoint: (depth, FactSource.APPROXIMATE) for endpoint, depth in self._routed.lookup(blocks).items()
        }
        if self._events:
            hashes = token_blocks(array("I", blocks), _BLOCK_TOKENS, self._root)
            for endpoint, match in self._precise.lookup(lambda _: hashes).items():
                if match.device_tokens >= matched.get(endpoint, (0, None))[0]:
                    matched[endpoint] = (match.device_tokens, FactSource.PRECISE)
        self._hot.touch(blocks)
        overlaps = {
            endpoint: Overlap(min(depth, limit) * block_size, source=source)
            for endpoint, (depth, source) in matched.items()
        }
        return OverlapFacts(turn.prompt_tokens, overlaps, self._hot.hot_prefix_blocks(blocks) * block_size)

    def routed(self, endpoint: int, turn: Turn) -> Claim:
        if self._false_entries and self._rng.random() < self._false_entries:
            self._routed.insert(self._rng.choice(self._ids), turn.blocks)
        return self._routed.route(self._ids[endpoint], turn.blocks)

    def settled(self, endpoint: int, turn: Turn, claim: Claim, *, predicted: int, cached: int) -> None:
        if cached < predicted:
            self._routed.contradict(self._ids[endpoint], turn.blocks, cached // self._block_size)
        if self._events:
            self._routed.rollback(claim)
        else:
            self._routed.confirm(claim)

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        translated = [_on_the_wire(event) for event in events]
        self._precise.apply(self._ids[endpoint], 0, translated)


def endpoint_id(index: int) -> EndpointId:
    """Name of a simulated endpoint."""
    return EndpointId(f"e{index}")


def _on_the_wire(event: KvEvent) -> wire.KvEvent:
    if isinstance(event, BlockStored):
        return wire.BlockStored(event.block_hashes, event.parent, array("I", event.block_hashes), _BLOCK_TOKENS)
    if isinstance(event, BlockRemoved):
        return wire.BlockRemoved((event.block_hash,))
    return wire.AllBlocksCleared()
