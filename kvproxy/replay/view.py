"""What a router knows of the engines' caches in a replay: the proxy's own indexes, fed as the proxy feeds them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from kvproxy.balancing.policy import FactSource, Overlap, OverlapFacts
from kvproxy.balancing.trust import Trust
from kvproxy.clients.kv_events import events as wire
from kvproxy.prefix.approximate import ApproximateIndex
from kvproxy.prefix.capacities import Capacities
from kvproxy.prefix.hashing import token_blocks
from kvproxy.prefix.holding import Claim
from kvproxy.prefix.hot_blocks import HotBlocks
from kvproxy.prefix.precise import PreciseIndex, precise_root
from kvproxy.replay.settings import FleetSettings, IndexMode
from kvproxy.replay.trace import Turn
from kvproxy.simulator.kv_event import BlockRemoved, BlockStored, KvEvent
from kvproxy.types import EndpointId

#: Takes the tokens a response was predicted to find cached, and those it did.
Settle = Callable[[int, int], None]

#: A trace names blocks, not tokens: to the precise index each block is one token, its id.
_BLOCK_TOKENS = 1


class CacheView(Protocol):
    """Where the facts of a pick come from. Endpoints are numbered."""

    def arrived(self, turn: Turn) -> None:
        """A request came; once each, however often its facts are asked for."""
        ...

    def facts(self, turn: Turn) -> OverlapFacts:
        """What is known about this prompt now."""
        ...

    def routed(self, endpoint: int, turn: Turn) -> Settle:
        """The request those facts were for goes there; the answer is called once, when its response came."""
        ...

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        """KV events of one endpoint."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What the indexes said of one prompt, in blocks by endpoint."""

    turn: Turn
    announced: dict[EndpointId, int]
    routed: dict[EndpointId, int]


class IndexView:
    """The indexes of a proxy. In `events` mode the precise index follows the engines, what is in flight is added to it,
    and what was routed backs its claims; in `approximate` mode what was routed, with the engines' capacity, is all.
    """

    def __init__(self, fleet: FleetSettings, block_size: int, *, rng: Random) -> None:
        self._block_size = block_size
        self._ids = [endpoint_id(index) for index in range(fleet.instances)]
        self._events = fleet.index is IndexMode.EVENTS
        capacity = int(fleet.capacity_tokens * fleet.index_capacity) // block_size
        self._routed = ApproximateIndex(capacity_blocks=capacity)
        self._capacities = Capacities(self._routed, learning=fleet.learn_capacity and not self._events)
        self._in_flight = ApproximateIndex(capacity_blocks=capacity)
        self._precise = PreciseIndex()
        self._root = precise_root(_BLOCK_TOKENS)
        self._hot = HotBlocks(endpoints=fleet.instances)
        self._trust = Trust()
        self._rng = rng
        self._asked: Asked | None = None  # by the latest `facts`: the pick follows in the same step
        self._false_entries = fleet.wrong_share / (1.0 - fleet.wrong_share)  # for each true one

    def arrived(self, turn: Turn) -> None:
        self._hot.touch(turn.blocks)

    def facts(self, turn: Turn) -> OverlapFacts:
        blocks, block_size = turn.blocks, self._block_size
        limit = (turn.prompt_tokens - 1) // block_size  # the last token is always computed
        routed = self._routed.lookup(blocks)
        self._asked = Asked(turn, self._announced(blocks), routed)
        depths = self._believed(self._asked) if self._events else routed
        source = FactSource.PRECISE if self._events else FactSource.APPROXIMATE
        overlaps = {
            endpoint: Overlap(min(depth, limit) * block_size, source=source) for endpoint, depth in depths.items()
        }
        return OverlapFacts(turn.prompt_tokens, overlaps, self._hot.hot_prefix_blocks(blocks) * block_size)

    def routed(self, endpoint: int, turn: Turn) -> Settle:
        name, asked = self._ids[endpoint], self._asked
        assert asked is not None
        assert asked.turn is turn
        if self._false_entries and self._rng.random() < self._false_entries:
            self._mislead(turn)
        claims = (self._routed.route(name, turn.blocks), self._in_flight.route(name, turn.blocks))
        return partial(self._settle, name, asked, claims)

    def _settle(
        self, endpoint: EndpointId, asked: Asked, claims: tuple[Claim, Claim], predicted: int, cached: int
    ) -> None:
        turn, cached_blocks = asked.turn, cached // self._block_size
        lost = self._capacities.observe(claims[0], cached_blocks)
        if cached < predicted:
            self._routed.contradict(endpoint, turn.blocks, cached_blocks)
        if lost:
            self._routed.insert(endpoint, turn.blocks)
        self._routed.confirm(claims[0])
        self._in_flight.rollback(claims[1])
        limit = (turn.prompt_tokens - 1) // self._block_size
        announced, backed = (min(depths.get(endpoint, 0), limit) for depths in (asked.announced, asked.routed))
        self._trust.observe(endpoint, announced, backed, cached_blocks)

    def observe(self, endpoint: int, events: Sequence[KvEvent]) -> None:
        self._precise.apply(self._ids[endpoint], 0, [_on_the_wire(event) for event in events])

    def _announced(self, blocks: array[int]) -> dict[EndpointId, int]:
        """Leading blocks by events alone."""
        if not self._events:
            return {}
        hashes = token_blocks(array("I", blocks), _BLOCK_TOKENS, self._root)
        return {endpoint: match.device_tokens for endpoint, match in self._precise.lookup(lambda _: hashes).items()}

    def _believed(self, asked: Asked) -> dict[EndpointId, int]:
        """Events as far as they are trusted, and what is in flight."""
        depths = self._in_flight.lookup(asked.turn.blocks)
        for endpoint, depth in asked.announced.items():
            trusted = self._trust.believed(endpoint, depth, asked.routed.get(endpoint, 0))
            depths[endpoint] = max(trusted, depths.get(endpoint, 0))
        return depths

    def _mislead(self, turn: Turn) -> None:
        """A false entry: some endpoint holds this prompt, or so it says."""
        endpoint = self._rng.choice(self._ids)
        if self._events:
            self._precise.apply(
                endpoint, 0, [_on_the_wire(BlockStored(tuple(turn.blocks), None))] if turn.blocks else []
            )
        else:
            self._routed.insert(endpoint, turn.blocks)


def endpoint_id(index: int) -> EndpointId:
    """Name of a simulated endpoint."""
    return EndpointId(f"e{index}")


def _on_the_wire(event: KvEvent) -> wire.KvEvent:
    if isinstance(event, BlockStored):
        return wire.BlockStored(event.block_hashes, event.parent, array("I", event.block_hashes), _BLOCK_TOKENS)
    if isinstance(event, BlockRemoved):
        return wire.BlockRemoved((event.block_hash,))
    return wire.AllBlocksCleared()
