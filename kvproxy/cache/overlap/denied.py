"""Placements denied by an engine, since no event reports deletions on a disk or in a shared store."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cachetools import TTLCache

from kvproxy.base.types import Clock, EndpointId, LowerTokens, Tier, count_lower

#: How long, and for how many prompts, denied placements are not trusted.
DISTRUST_S = 60.0
DISTRUSTED = 10_000
#: Where a shared store is.
EVERY_ENDPOINT = EndpointId("")
_FAR = (Tier.DISK, Tier.SHARED)


#: Denials of one prompt: the place, and the tokens that were there.
Denials = Sequence[tuple[EndpointId, int]]


class DeniedPlacements:
    """Denials by the engines of one cluster: hints of a lookup service about a prompt, and placements on a disk at one
    endpoint or in a shared store at all of them, for all prompts with that prefix. After a while both are trusted
    again: an engine may have computed the prompt meanwhile."""

    def __init__(self, clock: Clock) -> None:
        #: By the first block that was not there, and where: tokens that were.
        self._proven: TTLCache[tuple[int, EndpointId], int] = TTLCache(DISTRUSTED, DISTRUST_S, timer=clock)
        #: These blocks with the denied place, some that are no longer among them: quick to compare with a prompt's.
        self._places: dict[int, set[EndpointId]] = {}
        #: By endpoint and the first block of a prompt: tokens that the engine had of it.
        self._hints: TTLCache[tuple[EndpointId, int], int] = TTLCache(DISTRUSTED, DISTRUST_S, timer=clock)

    def __len__(self) -> int:
        return len(self._proven)

    def note_denial(
        self,
        endpoint: EndpointId,
        hashes: array[int],
        cached_tokens: int,
        cached_blocks: int = 0,
        lower: LowerTokens = (),
    ) -> None:
        """Note that the engine had only `cached_tokens` of this prompt, `cached_blocks` of its blocks, although more
        were announced on these tiers."""
        if not hashes:
            return
        self._hints[endpoint, hashes[0]] = cached_tokens
        tiers = {tier for tier, _ in lower}
        denied = hashes[min(cached_blocks, len(hashes) - 1)]
        places = ((Tier.SHARED, EVERY_ENDPOINT), (Tier.DISK, endpoint))
        for place in [place for tier, place in places if tier in tiers]:
            if len(self._places) >= 2 * DISTRUSTED:
                self._forget_old()
            self._proven[denied, place] = cached_tokens
            self._places.setdefault(denied, set()).add(place)

    def find_denials(self, hashes: array[int]) -> Denials:
        """Return the denials of this prompt, in one pass over its blocks for all endpoints."""
        if self._places.keys().isdisjoint(hashes):
            return ()
        asked = [(block, place) for block in self._places.keys() & set(hashes) for place in self._places[block]]
        proven = [(place, self._proven.get((block, place))) for block, place in asked]  # one read: time goes on
        return [(place, tokens) for place, tokens in proven if tokens is not None]

    def cap_hint(self, endpoint: EndpointId, hashes: array[int], tokens: int) -> int:
        """Return as many of the `tokens` that a hint promises of this prompt as are trusted."""
        proven = self._hints.get((endpoint, hashes[0])) if hashes else None
        return tokens if proven is None else min(tokens, proven)

    def _forget_old(self) -> None:
        self._places = {}
        for block, place in self._proven:
            self._places.setdefault(block, set()).add(place)


def trusted_tokens(endpoint: EndpointId, held: LowerTokens, denials: Denials) -> int:
    """Return the trusted part of a prompt's announced tokens by tier: those nearer than the disk or before the denied
    ones."""
    tokens = count_lower(held)
    near = 0
    for tier, here in held:
        if tier in _FAR:
            place = EVERY_ENDPOINT if tier is Tier.SHARED else endpoint
            tokens = min([tokens, *(max(near, proven) for where, proven in denials if where == place)])
        near += here
    return tokens
