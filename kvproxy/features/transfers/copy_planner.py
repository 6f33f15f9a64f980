"""Copies on demand: where a request may go together with KV that lies elsewhere. The proxy and replays ask this.

Part of the decision: for each endpoint, the prompt's longest published beginning anywhere is offered as if it were
there, at the price of waiting for the links of both ends and of the copy itself. Beginning the copy reserves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec

from kvproxy.base.types import EndpointId, Tier
from kvproxy.cluster.routing.costs import own_s, own_s_with
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import Ledgered, Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel

#: Slower links are not used: the copy delays more than it saves. 1 GB/s where a token's KV is 128 KiB.
LEAST_TOKENS_PER_S = 8192.0
#: By how much a copy has to be faster than computing: it takes two engines' links from others besides.
SAVES = 2.0
#: Weights of the seconds that a request waits for its copy, and of those that links are taken: an engine that waits for
#: a copy goes on with others, and a link with time to spare costs little. Tuned on halves of the traces that no report
#: shows.
LATE = 0.5
LINK = 0.02
#: Cost of the memory that a copy takes from others, as a share of the prefill seconds it saves. Tuned as above.
DISPLACES = 0.15
#: Share of an engine's memory for requests in flight and copies, beyond which no copy is made.
MOST_IN_FLIGHT = 0.9
#: Tiers that need no transfer.
NEAR = frozenset({Tier.DEVICE, Tier.PINNED, Tier.HOST})
#: Source of tokens that an endpoint's own instance reads: a shared store, a disk.
STORE = EndpointId("")
NOTHING: Mapping[EndpointId, int] = {}
NOT_HELD = Overlap(0)

LedgeredT = TypeVar("LedgeredT", bound=Ledgered)


def refuse_none(tokens: int) -> bool:
    """Return False: this limit lets every copy through."""
    return False


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """Cost of a copy, and the saving it must exceed."""

    tokens_per_s: float  # of one copy; infinite: not known yet
    latency_s: float
    min_tokens: int  # fewer are not copied
    step_tokens: int  # a holder within this many tokens of the longest is an equally good source
    lands: Tier = Tier.DEVICE


@dataclass(slots=True)
class Transfer:
    """From one endpoint, or a STORE, to another, which held so much before: so many leading tokens, by then."""

    source: EndpointId
    target: EndpointId
    held: Overlap
    tokens: int
    over_at: float

    @property
    def missing(self) -> int:
        """Tokens that are copied."""
        return self.tokens - near_tokens(self.held)


@dataclass(slots=True)
class Links:
    """When each endpoint's two links are free again, where copies are under way."""

    out: dict[EndpointId, float] = field(default_factory=dict)
    into: dict[EndpointId, float] = field(default_factory=dict)

    def reserve(self, transfer: Transfer, over_at: float) -> None:
        """Both are taken until then."""
        transfer.over_at = self.into[transfer.target] = over_at
        if transfer.source != STORE:
            self.out[transfer.source] = over_at

    def release(self, transfer: Transfer) -> None:
        """Release the links of a transfer that ended sooner or later than estimated; later ones keep theirs."""
        for links, endpoint in ((self.into, transfer.target), (self.out, transfer.source)):
            if links.get(endpoint) == transfer.over_at:
                del links[endpoint]

    def free_at(self, source: EndpointId, target: EndpointId, now: float) -> float:
        """When a copy could begin."""
        return max(now, self.out.get(source, 0.0), self.into.get(target, 0.0))


class TransferPlanner:
    """Between endpoints with a link each way. Pure but for its links and its draws of chance."""

    def __init__(self, terms: LinkTerms, *, rng: Random) -> None:
        self.terms = terms
        self.links = Links()
        self._rng = rng
        self._offered: tuple[OverlapFacts, Mapping[EndpointId, Transfer]] | None = None  # by the latest `offer`

    def offer(
        self,
        asked: PickRequest,
        endpoints: Sequence[Ledgered],
        speeds: SpeedModel,
        now: float,
        *,
        sources: Sequence[Ledgered],
        published: Mapping[EndpointId, int],
        stored: Mapping[EndpointId, int] = NOTHING,
        refuses: Callable[[int], bool] = refuse_none,
    ) -> PickRequest:
        """Return the request with what could be copied to each endpoint, and the seconds that costs. `published`:
        leading tokens that each of the `sources` could give; `stored`: those that an endpoint's own instance could
        bring nearer. A copy of so many tokens is left out where something `refuses` it."""
        facts = asked.facts
        self._offered = None
        terms = self.terms
        if terms.tokens_per_s < LEAST_TOKENS_PER_S:
            return asked
        giving = {one.id: one for one in sources if published.get(one.id)}
        anywhere = self._draw_source(list(giving.values()), published, now)
        found = dict(facts.by_endpoint)
        offered = {}
        price_s = {}
        copied = dict[tuple[int, int], Overlap]()
        for target in endpoints if giving or stored else ():
            here = target.id
            held = found.get(here, NOT_HELD)
            source = anywhere
            if here in giving:
                source = self._draw_source([one for one in giving.values() if one.id != here], published, now)
            transfer = self._plan_transfer(here, held, source, published, stored.get(here, 0), now)
            if transfer is None or _is_full(target.load, transfer.tokens):
                continue
            copy_s = terms.latency_s + transfer.missing / terms.tokens_per_s
            overlap = copied.get((id(held), transfer.tokens))
            if overlap is None:  # endpoints with equal results share one object, which policies examine once
                overlap = copied[id(held), transfer.tokens] = landed(held, transfer.tokens, terms.lands)
            saved_s = own_s(facts, here, speeds) - own_s_with(overlap, facts.prompt_tokens, here, speeds)
            if saved_s < SAVES * copy_s or refuses(transfer.missing):
                continue
            wait_s = target.load.wait_s(speeds.seconds, speeds.slowness(here, now), now)
            late_s = max(0.0, transfer.over_at - now - wait_s)
            offered[here], found[here] = transfer, overlap
            price_s[here] = LATE * late_s + LINK * copy_s + DISPLACES * saved_s
        if not offered:
            return asked
        facts = msgspec.structs.replace(facts, by_endpoint=found)
        self._offered = facts, offered
        return msgspec.structs.replace(asked, facts=facts, transfer_s=price_s)

    def find_transfer(self, decision: Decision[Any]) -> Transfer | None:
        if self._offered is None or self._offered[0] is not decision.request.facts:
            return None
        return self._offered[1].get(decision.endpoint.id)

    def _draw_source(
        self, sources: Sequence[Ledgered], published: Mapping[EndpointId, int], now: float
    ) -> tuple[EndpointId, int]:
        """Return the holder whose link is free first, and among equals the fewer requests wait there, the likelier; and
        the most that any has."""
        able = find_holders(sources, published, self.terms.step_tokens)
        if not able:
            return STORE, 0
        out = self.links.out
        earliest = min([max(now, out.get(one.id, 0.0)) for one in able])
        source = draw_source([one for one in able if out.get(one.id, 0.0) <= earliest], self._rng)
        return source.id, max([published[one.id] for one in able])

    def _plan_transfer(
        self,
        target: EndpointId,
        held: Overlap,
        drawn: tuple[EndpointId, int],
        published: Mapping[EndpointId, int],
        stored: int,
        now: float,
    ) -> Transfer | None:
        """From its own store where that holds as much, else from the one that was drawn."""
        source, longest = drawn
        if stored > longest - self.terms.step_tokens:
            source = STORE
        tokens = stored if source == STORE else published[source]
        transfer = Transfer(source, target, held, tokens, self.links.free_at(source, target, now))
        if transfer.missing < self.terms.min_tokens:
            return None
        transfer.over_at += self.terms.latency_s + transfer.missing / self.terms.tokens_per_s
        return transfer


def landed(held: Overlap, tokens: int, tier: Tier) -> Overlap:
    """Return the overlap of an endpoint after these leading tokens were copied to its tier."""
    if tokens <= near_tokens(held):
        return held
    device = tokens if tier is Tier.DEVICE else min(held.device_tokens, tokens)
    lower = ((tier, tokens - device),) if tokens > device else ()
    return msgspec.structs.replace(held, device_tokens=device, lower=lower)


def _is_full(load: EndpointLoad, tokens: int) -> bool:
    """Return True if these tokens are too many beside those of the requests in flight: all other blocks would be
    evicted, and soon the copied ones."""
    engine = load.engine
    if engine is None or not engine.capacity_tokens:
        return False
    return load.resident_tokens + tokens > MOST_IN_FLIGHT * engine.capacity_tokens


def find_holders(endpoints: Sequence[LedgeredT], held: Mapping[EndpointId, int], step: int) -> Sequence[LedgeredT]:
    """Return the endpoints that hold as much as the longest, but for a step."""
    longest = max([held.get(one.id, 0) for one in endpoints], default=0)
    return [one for one in endpoints if held.get(one.id, 0) > max(0, longest - step)]


def draw_source(holders: Sequence[LedgeredT], rng: Random) -> LedgeredT:
    """One of them; the fewer requests wait there, the likelier."""
    return rng.choices(holders, [1.0 / (1 + one.load.pending_requests) for one in holders])[0]


def near_tokens(overlap: Overlap) -> int:
    """Leading tokens from which nothing has to be transferred."""
    return overlap.device_tokens + sum([tokens for tier, tokens in overlap.lower if tier in NEAR])
