"""Transfers on demand, in a replay: where a request may go together with the KV that another engine has of its prompt.

Part of the decision: for each engine, the prompt's longest published beginning anywhere is offered as if it were there,
at the price of waiting for the links of both engines and of the copy itself. Is such an engine chosen, both links are
reserved, the copy is made, and the request joins the engine with it; of what the source does not have after all nothing
is copied, and the engine computes it. (A request that joins at once, beside a copy that should be over when its turn
comes, does worse than one that waits, and than none that copies: an engine admits a request, and with that settles what
it reuses, long before it computes.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from kvproxy.routing.policy import Ledgered, Overlap, OverlapFacts, PickRequest
from kvproxy.routing.selector import Decision
from kvproxy.routing.speeds import SpeedModel
from kvproxy.routing.work import prefill_s
from kvproxy.simulator.engine import Engine
from kvproxy.types import EndpointId

#: Slower links are not used: the copy delays more than it saves. 1 GB/s where a token's KV is 128 KiB.
LEAST_TOKENS_PER_S = 8192.0
#: By how much a copy has to be faster than computing: it takes two engines' links from others besides.
SAVES = 2.0


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """A link each way between each engine and the others. A token's KV is that of 128 KiB unless said
    otherwise."""

    gb_per_s: float
    latency_s: float = 0.002
    min_tokens: int = 512  # fewer are not copied
    kv_bytes_per_token: int = 131_072

    @property
    def tokens_per_s(self) -> float:
        """Of one copy."""
        return self.gb_per_s * 1e9 / self.kv_bytes_per_token


@dataclass(slots=True)
class Transfer:
    """From one engine to another: so many leading tokens, by then."""

    source: EndpointId
    target: EndpointId
    tokens: int
    over_at: float


@dataclass(slots=True)
class TransferCounts:
    """What became of them."""

    made: int = 0
    tokens: int = 0
    empty: int = 0  # the source had nothing (any more)


@dataclass(slots=True)
class _Links:
    """When each engine's two links are free again."""

    out: dict[EndpointId, float] = field(default_factory=dict)
    into: dict[EndpointId, float] = field(default_factory=dict)


class TransferPlanner:
    """Between engines with a link each way. Pure but for its links and its draws of chance."""

    def __init__(self, plan: LinkPlan, *, block_size: int, rng: Random) -> None:
        self._plan = plan
        self._tokens_per_s = plan.tokens_per_s
        self._block_size = block_size
        self._rng = rng
        self._links = _Links()
        self._offered: tuple[PickRequest, Mapping[EndpointId, Transfer]] | None = None  # by the latest `offer`
        self.counts = TransferCounts()

    def offer(self, asked: PickRequest, endpoints: Sequence[Ledgered], speeds: SpeedModel, now: float) -> PickRequest:
        """The request with what could be copied to each endpoint, and the seconds that costs."""
        facts, self._offered = asked.facts, None
        if self._tokens_per_s < LEAST_TOKENS_PER_S or not facts.by_endpoint:
            return asked
        published = {one.id: self._published_tokens(facts, one.id) for one in endpoints}
        longest = max(published.values(), default=0)
        holders = [one for one in endpoints if published[one.id] > max(0, longest - self._block_size)]
        found, offered, price_s = dict(facts.by_endpoint), {}, {}
        for target in endpoints:
            missing = longest - (matched := facts.matched_tokens(target.id))
            computed_s = prefill_s(missing, matched, 0.0, speeds.seconds)
            if missing < self._plan.min_tokens or SAVES * missing / self._tokens_per_s > computed_s:
                continue
            transfer = self._plan_transfer(holders, target, published, missing, now)
            wait_s = target.load.wait_s(speeds.seconds, speeds.slowness(target.id, now), now)
            offered[target.id] = transfer
            price_s[target.id] = max(0.0, transfer.over_at - now - wait_s) + missing / self._tokens_per_s
            found[target.id] = Overlap(transfer.tokens, claimed_tokens=transfer.tokens)
        if not offered:
            return asked
        facts = msgspec.structs.replace(facts, by_endpoint=found)
        asked = msgspec.structs.replace(asked, facts=facts, adapter_s=price_s)
        self._offered = asked, offered
        return asked

    def find_transfer(self, decision: Decision[Any]) -> Transfer | None:
        """The one that this decision is made with."""
        if self._offered is None or self._offered[0] is not decision.request:
            return None
        return self._offered[1].get(decision.endpoint.id)

    def begin(
        self, transfer: Transfer, source: Engine, target: Engine, blocks: Sequence[int], now: float
    ) -> tuple[float, Sequence[int]]:
        """Reserves both links; when it is over, and the blocks that are there then: what the source truly has."""
        wanted = blocks[: transfer.tokens // self._block_size]
        held = source.match_prefix(wanted)
        missing = max(0, held - target.match_prefix(wanted))
        self.counts.made += 1
        self.counts.tokens += missing * self._block_size
        self.counts.empty += not missing
        if not missing:
            return now + self._plan.latency_s, ()
        began = max(now, self._links.out.get(transfer.source, 0.0), self._links.into.get(transfer.target, 0.0))
        over_at = began + self._plan.latency_s + missing * self._block_size / self._tokens_per_s
        self._links.out[transfer.source] = self._links.into[transfer.target] = over_at
        return over_at, wanted[:held]

    def _published_tokens(self, facts: OverlapFacts, endpoint: EndpointId) -> int:
        """In the engine's memory, by its own events: what is only promised there cannot be copied."""
        overlap = facts.by_endpoint.get(endpoint)
        return 0 if overlap is None else min(overlap.device_tokens, overlap.claimed_tokens)

    def _plan_transfer(
        self,
        holders: Sequence[Ledgered],
        target: Ledgered,
        published: Mapping[EndpointId, int],
        missing: int,
        now: float,
    ) -> Transfer:
        """From the holder whose link is free first; among equals the fewer requests wait there, the likelier."""
        free = {one.id: max(now, self._links.out.get(one.id, 0.0)) for one in holders if one is not target}
        earliest = min(free.values())
        able = [one for one in holders if free.get(one.id) == earliest]
        source = self._rng.choices(able, [1.0 / (1 + one.load.pending_requests) for one in able])[0]
        began = max(earliest, self._links.into.get(target.id, 0.0))
        over_at = began + self._plan.latency_s + missing / self._tokens_per_s
        return Transfer(source.id, target.id, published[source.id], over_at)
