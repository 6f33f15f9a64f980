"""Merge several sources' overlaps for one prompt: the larger contiguous match wins. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvproxy.base.types import EndpointId, LowerTokens, Tier, count_lower, cut_lower, skip_lower
from kvproxy.cache.feedback.trust import Trust
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import FactSource, Overlap, OverlapFacts

NOTHING: Mapping[EndpointId, int] = {}


@dataclass(frozen=True, slots=True)
class HolderOverlap:
    """Tokens one endpoint can load, by a lookup service. Not `contiguous`: the number is a hint, an upper bound."""

    endpoint: EndpointId
    tokens: int
    contiguous: bool
    source: FactSource
    lower: LowerTokens = ()  # the same by tier; (): host memory


#: Blocks of text that a prompt has in common behind the last whole one: half of one, less half a block of the engine's.
BEYOND = 0.375


def merge_overlaps(
    *,
    routed: Mapping[EndpointId, int],
    in_flight: Mapping[EndpointId, int] = NOTHING,
    tokens_per_block: float = 1.0,
    announced: Mapping[EndpointId, PreciseMatch] | None = None,
    exact: Collection[EndpointId] = (),
    trust: Trust,
    looked_up: Sequence[HolderOverlap] = (),
    lookup_trust: Trust,
    steps: Mapping[EndpointId, int] = NOTHING,
    prompt_tokens: int = 0,
) -> dict[EndpointId, Overlap]:
    """Merge the overlaps of one prompt by endpoint.

    `routed` comes from the approximate index, in leading blocks of `tokens_per_block`; of that, `in_flight` are blocks
    of requests in flight. `announced` comes from KV events (None where none are followed), without a gap for the
    endpoints in `exact`, and `trust` how far they are trusted; `looked_up` comes from a lookup service, trusted as far
    as `lookup_trust` and never beyond `prompt_tokens`. An endpoint in `steps` reuses multiples of so many tokens."""
    if announced is None:
        # Endpoints that hold as much as each other share one object: of a large fleet most do, and a policy sees it.
        # a loop: comprehensions are functions to Python 3.11
        found = {}
        by_depth = dict[int, Overlap]()
        for endpoint, blocks in routed.items():
            overlap = by_depth.get(blocks)
            if overlap is None:
                tokens = blocks * tokens_per_block
                if tokens + tokens_per_block <= prompt_tokens:  # there is a further block, which differs
                    tokens += BEYOND * tokens_per_block
                overlap = by_depth[blocks] = Overlap(int(tokens))
            found[endpoint] = overlap
    else:
        routed = {endpoint: int(blocks * tokens_per_block) for endpoint, blocks in routed.items()}
        in_flight = {endpoint: int(blocks * tokens_per_block) for endpoint, blocks in in_flight.items()}
        found = _with_events(routed, in_flight, announced, exact, trust)
    if looked_up:
        _add_holders(found, looked_up, prompt_tokens, lookup_trust)
    for endpoint, step in steps.items():
        if endpoint in found:
            found[endpoint] = in_steps(found[endpoint], step, prompt_tokens)
    return found


def _with_events(
    routed: Mapping[EndpointId, int],
    in_flight: Mapping[EndpointId, int],
    announced: Mapping[EndpointId, PreciseMatch],
    exact: Collection[EndpointId],
    trust: Trust,
) -> dict[EndpointId, Overlap]:
    """Merge routed prompts with KV events.

    A complete event stream (`exact`) is trusted over everything that was ever routed there. Only this prompt's blocks
    in requests still `in_flight` count besides: they are promised and not yet announced. Without a complete stream the
    larger match wins. Claims of events beyond routed prompts count by the accuracy of earlier ones."""
    found = {}
    shared: dict[tuple[int, int, int, int, LowerTokens], Overlap] = {}  # one object for all that are alike
    plain: PreciseMatch | None = None  # the latest that counted in full; neighbours of a large fleet share it
    plain_backed = plain_tokens = 0
    plain_overlap = Overlap(0)
    for endpoint, match in announced.items():
        backed = routed.get(endpoint, 0)
        promised = in_flight.get(endpoint, 0) if endpoint in exact else backed
        if match is plain and backed == plain_backed and promised <= plain_tokens and endpoint not in trust:
            found[endpoint] = plain_overlap
            continue
        device = match.device_tokens
        lower = match.lower
        claimed = believed = device + count_lower(lower) if lower else device
        if claimed > backed:
            believed = trust.trusted_tokens(endpoint, claimed, backed)
            device = min(device, believed)
        if promised > believed:
            found[endpoint] = Overlap(promised, claimed_tokens=claimed)
        else:
            alike = (device, believed, claimed, backed, lower)
            overlap = shared.get(alike)
            if overlap is None:
                lower = cut_lower(lower, believed - device)
                overlap = Overlap(device, lower, FactSource.PRECISE, 0.0, claimed, min(backed, claimed))
                shared[alike] = overlap
            found[endpoint] = overlap
            if believed == claimed:
                plain = match
                plain_backed = backed
                plain_tokens = believed
                plain_overlap = overlap
    for endpoint, backed in routed.items():
        if endpoint not in exact and endpoint not in announced:
            found[endpoint] = Overlap(backed)
    for endpoint, promised in in_flight.items():
        if endpoint in exact and endpoint not in announced:
            found[endpoint] = Overlap(promised)
    return found


def _add_holders(
    found: dict[EndpointId, Overlap], looked_up: Iterable[HolderOverlap], prompt_tokens: int, trust: Trust
) -> None:
    """Add the holders of a lookup to local data.

    LMCache reports lower tiers, so the tokens a holder adds to an endpoint's match are on those. Tokens without other
    backing count by the accuracy of earlier such claims about that endpoint."""
    for holder in looked_up:
        known = found.get(holder.endpoint)
        tokens = min(holder.tokens, prompt_tokens)
        backed = 0 if known is None else known.tokens
        if tokens > backed:
            device = 0 if known is None else known.device_tokens
            believed = trust.trusted_tokens(holder.endpoint, tokens, backed)
            lower = cut_lower(skip_lower(holder.lower or ((Tier.HOST, tokens),), device), believed - device)
            found[holder.endpoint] = Overlap(device, lower, holder.source, 0.0, tokens, backed)


def in_steps(overlap: Overlap, step: int, prompt_tokens: int) -> Overlap:
    """Reduce an overlap to the multiples of `step` that the engine reuses; it always computes the last token."""
    most = overlap.tokens if prompt_tokens <= 0 else min(overlap.tokens, prompt_tokens - 1)
    tokens = most - most % step
    device = min(overlap.device_tokens, tokens)
    return msgspec.structs.replace(
        overlap,
        device_tokens=device,
        lower=cut_lower(overlap.lower, tokens - device),
        claimed_tokens=min(overlap.claimed_tokens, tokens),
        backed_tokens=min(overlap.backed_tokens, tokens),
        held_tokens=overlap.tokens,
    )


def tolerated_tokens(predicted_tokens: int) -> int:
    """Return what reuse may stay behind a right prediction by: engines reuse whole blocks and always compute the last
    one, and lengths in bytes only estimate tokens."""
    return min(predicted_tokens // 2, 64) + predicted_tokens // 8


def is_contradicted(predicted_tokens: int, cached_tokens: int) -> bool:
    """Return True if an engine reused too little for the prediction to have been right."""
    return cached_tokens < predicted_tokens and cached_tokens + tolerated_tokens(predicted_tokens) < predicted_tokens


def preferred_endpoint(
    facts: OverlapFacts, endpoints: Iterable[Endpoint], *, model: str, min_tokens: int
) -> EndpointId | None:
    """Return the endpoint that serves the model and holds most, at least `min_tokens` (never less than one); among
    equals the first."""
    best = None
    most = max(min_tokens, 1) - 1
    held = facts.by_endpoint
    prompt_tokens = facts.prompt_tokens
    for endpoint in endpoints:
        overlap = held.get(endpoint.id)
        if overlap is not None:
            tokens = overlap.tokens if overlap.lower else overlap.device_tokens
            if tokens > prompt_tokens:
                tokens = prompt_tokens
            if tokens > most and endpoint.serves(model):
                best = endpoint.id
                most = tokens
    return best
