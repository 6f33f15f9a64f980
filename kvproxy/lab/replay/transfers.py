"""Transfers on demand, in a replay: links between the simulated engines, and the copies over them.

A decision is made with what could be copied (features/transfers/copy_planner.py). Is an engine chosen with a copy, both
links are reserved, the copy is made, and the request joins the engine with it; of what the source does not have after
all nothing is copied, and the engine computes it. (A request that joins at once, beside a copy that should be over when
its turn comes, does worse than one that waits, and than none that copies: an engine admits a request, and with that
settles what it reuses, long before it computes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.routing.policy import Ledgered, Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.lab.simulator.engine import Engine

if TYPE_CHECKING:
    from kvproxy.features.transfers.copy_planner import Transfer


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Link each way between each engine and the others. The default is 128 KiB of KV per token."""

    gb_per_s: float
    latency_s: float = 0.002
    min_tokens: int = 64  # fewer are not copied
    kv_bytes_per_token: int = 131_072

    @property
    def tokens_per_s(self) -> float:
        """Of one copy."""
        return self.gb_per_s * 1e9 / self.kv_bytes_per_token


@dataclass(slots=True)
class TransferCounts:
    """Counts of transfers by outcome."""

    made: int = 0
    tokens: int = 0
    empty: int = 0  # the source no longer had anything


class SimTransfers:
    """Copies between the simulated engines, as decisions ask for them."""

    def __init__(self, plan: LinkPlan, *, block_size: int, rng: Random) -> None:
        from kvproxy.features.transfers import copy_planner  # a replay without copies needs none of it

        self._plan = plan
        self.block_size = block_size
        self._landed = copy_planner.landed
        terms = copy_planner.LinkTerms(plan.tokens_per_s, plan.latency_s, plan.min_tokens, block_size)
        self._planner = copy_planner.TransferPlanner(terms, rng=rng)
        self.counts = TransferCounts()

    def offer(self, asked: PickRequest, endpoints: Sequence[Ledgered], speeds: SpeedModel, now: float) -> PickRequest:
        """Return the request with possible copies to each engine and their seconds."""
        published = {one.id: _published_tokens(asked.facts, one.id) for one in endpoints}
        return self._planner.offer(asked, endpoints, speeds, now, sources=endpoints, published=published)

    def landed(self, transfer: Transfer, blocks: int) -> Overlap:
        """Return what the target holds once so many leading blocks are there."""
        return self._landed(transfer.held, blocks * self.block_size, Tier.DEVICE)

    def find_transfer(self, decision: Decision[Any]) -> Transfer | None:
        """Return the one that this decision is made with."""
        return self._planner.find_transfer(decision)

    def begin(
        self, transfer: Transfer, source: Engine, target: Engine, blocks: Sequence[int], now: float
    ) -> tuple[float, Sequence[int]]:
        """Reserves both links; when it is over, and the blocks that are there then: what the source truly has."""
        wanted = blocks[: transfer.tokens // self.block_size]
        held = source.own_cache.match_prefix(wanted, len(wanted))
        missing = max(0, held - target.own_cache.match_prefix(wanted, len(wanted)))
        self.counts.made += 1
        self.counts.tokens += missing * self.block_size
        self.counts.empty += not missing
        if not missing:
            return now + self._plan.latency_s, ()
        links = self._planner.links
        began = links.free_at(transfer.source, transfer.target, now)
        over_at = began + self._plan.latency_s + missing * self.block_size / self._plan.tokens_per_s
        links.reserve(transfer, over_at)
        return over_at, wanted[:held]


def _published_tokens(facts: OverlapFacts, endpoint: EndpointId) -> int:
    """In the engine's memory, by its own events: what is only promised there cannot be copied."""
    overlap = facts.by_endpoint.get(endpoint)
    return 0 if overlap is None else min(overlap.device_tokens, overlap.claimed_tokens)
