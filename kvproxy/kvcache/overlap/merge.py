"""What several sources say about one prompt, put together: the larger contiguous match wins. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvproxy.prefix.precise.index import PreciseMatch
from kvproxy.routing.policy import FactSource, Overlap, OverlapFacts
from kvproxy.routing.trust import Trust
from kvproxy.types import EndpointId


@dataclass(frozen=True, slots=True)
class HolderOverlap:
    """What a lookup service says one endpoint can load. Not `contiguous`: the number is a hint, an upper bound."""

    endpoint: EndpointId
    tokens: int
    contiguous: bool
    source: FactSource


def local_overlaps(
    *,
    routed: Mapping[EndpointId, int],
    in_flight: Mapping[EndpointId, int],
    announced: Mapping[EndpointId, PreciseMatch],
    exact: Collection[EndpointId],
    trust: Trust,
) -> dict[EndpointId, Overlap]:
    """What was routed and what KV events say, both in leading tokens of one prompt.

    A complete event stream (`exact`) is believed over everything that was ever routed there. Only this prompt's blocks
    in requests still `in_flight` count besides: they are promised and not yet announced. Without a complete stream the
    larger match wins. What events claim beyond what was routed counts for what earlier such claims proved worth.
    """
    found = {}
    for endpoint, match in announced.items():
        device, lower = match.device_tokens, match.lower_tokens
        claimed = believed = device + lower
        backed = routed.get(endpoint, 0)
        if claimed > backed:
            believed = trust.believed(endpoint, claimed, backed)
            device = min(device, believed)
        promised = in_flight.get(endpoint, 0) if endpoint in exact else backed
        if promised > believed:
            found[endpoint] = Overlap(promised)
        else:
            source = FactSource.PRECISE
            found[endpoint] = Overlap(device, believed - device, source, 0.0, claimed, min(backed, claimed))
    for endpoint, backed in routed.items():
        if endpoint not in exact and endpoint not in announced:
            found[endpoint] = Overlap(backed)
    for endpoint, promised in in_flight.items():
        if endpoint in exact and endpoint not in announced:
            found[endpoint] = Overlap(promised)
    return found


def is_contradicted(predicted_tokens: int, cached_tokens: int) -> bool:
    """Whether an engine reused too little for the prediction to have been right.

    Engines reuse whole blocks and always compute the last one; lengths in bytes only estimate tokens.
    """
    tolerance = min(predicted_tokens // 2, 64) + predicted_tokens // 8
    return cached_tokens + tolerance < predicted_tokens


def merged(
    local: Mapping[EndpointId, Overlap], claims: Iterable[HolderOverlap], *, prompt_tokens: int, trust: Trust
) -> dict[EndpointId, Overlap]:
    """Local knowledge with the claims of a lookup laid over it.

    LMCache speaks of host and disk tiers, so what a claim adds to an endpoint's match is lower-tier. Claims of nothing
    are passed over, and none counts for more than the prompt has. What nothing else backs counts for what earlier such
    claims about that endpoint proved worth.
    """
    found = dict(local)
    for claim in claims:
        known = found.get(claim.endpoint)
        tokens = min(claim.tokens, prompt_tokens)
        backed = 0 if known is None else known.tokens
        if tokens > backed:
            device = 0 if known is None else known.device_tokens
            believed = trust.believed(claim.endpoint, tokens, backed)
            found[claim.endpoint] = Overlap(device, believed - device, claim.source, 0.0, tokens, backed)
    return found


def preferred(
    facts: OverlapFacts,
    order: Iterable[EndpointId],
    *,
    min_tokens: int,
    serves: Callable[[EndpointId], bool] = lambda endpoint: True,
) -> EndpointId | None:
    """Who holds most, at least `min_tokens` (never less than one); among equals the first in `order`.

    `serves` is asked of those only that hold more than everybody before them.
    """
    best, most = None, max(min_tokens, 1) - 1
    held, prompt_tokens = facts.by_endpoint, facts.prompt_tokens
    for endpoint in order:
        overlap = held.get(endpoint)
        if overlap is not None:
            tokens = overlap.device_tokens + overlap.lower_tokens
            if tokens > prompt_tokens:
                tokens = prompt_tokens
            if tokens > most and serves(endpoint):
                best, most = endpoint, tokens
    return best
