"""Merge several sources' overlaps for one prompt: the larger contiguous match wins. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, filterfalse, islice, repeat
from operator import gt, is_not, ne

import msgspec

from kvproxy.base.types import EndpointId, LowerTokens, Tier, count_lower, cut_lower, skip_lower
from kvproxy.cache.feedback.trust import Trust
from kvproxy.cache.indexes.beginnings import PreciseMatch
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import PRECISE, FactSource, Overlap, OverlapFacts

NOTHING: Mapping[EndpointId, int] = {}


@dataclass(frozen=True, slots=True)
class HolderOverlap:
    """Tokens one endpoint can load, by a lookup service. Not `contiguous`: the number is a hint, an upper bound."""

    endpoint: EndpointId
    tokens: int
    contiguous: bool
    source: FactSource
    lower: LowerTokens = ()  # the same by tier; (): host memory


#: Endpoints, about, by which the overlap of most is found; fewer are merged one by one.
_SAMPLE = 16

#: Blocks of text that a prompt has in common behind the last whole one: half of one, less half a block of the engine's.
BEYOND = 0.375


def merge_overlaps(
    *,
    routed: Mapping[EndpointId, int],
    in_flight: Mapping[EndpointId, int] = NOTHING,
    announced: Mapping[EndpointId, PreciseMatch] | None = None,
    exact: Collection[EndpointId] = (),
    trust: Trust,
    looked_up: Sequence[HolderOverlap] = (),
    lookup_trust: Trust,
    steps: Mapping[EndpointId, int] = NOTHING,
    prompt_tokens: int = 0,
) -> dict[EndpointId, Overlap]:
    """Merge the overlaps of one prompt by endpoint.

    `routed` comes from the approximate index, in tokens; of that, `in_flight` are those of requests in flight.
    `announced` comes from KV events (None where none are followed), without a gap for the endpoints in `exact`, and
    `trust` how far they are trusted; `looked_up` comes from a lookup service, trusted as far as `lookup_trust` and
    never beyond `prompt_tokens`. An endpoint in `steps` reuses multiples of so many tokens. Endpoints that hold as much
    as each other share one object: of a large fleet most do, and a policy sees it."""
    if announced is None:
        lengths = set(routed.values())
        alike = dict(zip(lengths, map(Overlap, lengths), strict=True))
        found = dict(zip(routed, map(alike.__getitem__, routed.values()), strict=True))
    else:
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
    found, others = _usual_overlap(routed, in_flight, announced, exact, trust)
    shared: dict[tuple[int, int, int, int, LowerTokens], Overlap] = {}
    for endpoint in others:
        match = announced.get(endpoint)
        if match is None:
            continue
        backed = routed.get(endpoint, 0)
        promised = in_flight.get(endpoint, 0) if endpoint in exact else backed
        device = match.device_tokens
        lower = match.lower
        claimed = believed = device + count_lower(lower) if lower else device
        if claimed > backed:
            believed = trust.trusted_tokens(endpoint, claimed, backed)
            device = min(device, believed)
        if promised > believed:
            found[endpoint] = Overlap(promised, claimed_tokens=claimed)
            continue
        alike = (device, believed, claimed, backed, lower)
        overlap = shared.get(alike)
        if overlap is None:
            lower = cut_lower(lower, believed - device)
            overlap = Overlap(device, lower, PRECISE, 0.0, claimed, min(backed, claimed))
            shared[alike] = overlap
        found[endpoint] = overlap
    for tokens, complete in ((routed, False), (in_flight, True)):
        for endpoint in filterfalse(announced.__contains__, tokens):
            if (endpoint in exact) is complete:
                found[endpoint] = Overlap(tokens[endpoint])
    return found


def _usual_overlap(
    routed: Mapping[EndpointId, int],
    in_flight: Mapping[EndpointId, int],
    announced: Mapping[EndpointId, PreciseMatch],
    exact: Collection[EndpointId],
    trust: Trust,
) -> tuple[dict[EndpointId, Overlap], Iterable[EndpointId]]:
    """Return what most endpoints hold, for all that announced something, and which of them may hold something else
    (others may be among these). Without a look at each endpoint by itself: a large fleet has hundreds that are
    alike."""
    if len(announced) < _SAMPLE:
        return {}, announced
    step = len(announced) // _SAMPLE + 1
    some = list(islice(announced.values(), 0, None, step))
    kinds = [(id(some[at]), routed.get(one, 0)) for at, one in enumerate(islice(announced, 0, None, step))]
    kind = max(kinds, key=kinds.count)
    match = some[kinds.index(kind)]
    backed = kind[1]
    claimed = match.tokens
    usual = Overlap(match.device_tokens, match.lower, PRECISE, 0.0, claimed, min(backed, claimed))
    others = set(compress(announced, map(is_not, announced.values(), repeat(match))))
    if backed:
        others.update(compress(routed, map(ne, routed.values(), repeat(backed))))
        others.update(filterfalse(routed.__contains__, announced))
    else:
        others.update(routed)
    others.update(compress(in_flight, map(gt, in_flight.values(), repeat(claimed))))
    if backed > claimed:
        others.update(filterfalse(exact.__contains__, announced))
    elif backed < claimed:
        others.update(trust.tested)
    return dict.fromkeys(announced, usual), others


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
