"""Placements that an engine denied: nothing tells of what is deleted on a disk or in a shared store."""

from __future__ import annotations

from array import array

from cachetools import TTLCache

from kvproxy.types import Clock, EndpointId, LowerTokens, Tier, count_lower

#: How long, and for how many prompts, what the engine contradicted is not believed again.
DISTRUST_S, DISTRUSTED = 60.0, 10_000
#: Where a shared store is.
EVERY_ENDPOINT = EndpointId("")
_FAR = (Tier.DISK, Tier.SHARED)


class DeniedPlacements:
    """On a disk at one endpoint, in a shared store at all of them; wherever a prompt goes the same way. After a while
    they are believed again: an engine may have computed it meanwhile."""

    def __init__(self, clock: Clock) -> None:
        #: By the first block that was not there, and where: tokens that were.
        self._proven: TTLCache[tuple[EndpointId, int], int] = TTLCache(DISTRUSTED, DISTRUST_S, timer=clock)

    def __len__(self) -> int:
        return len(self._proven)

    def note_denial(
        self, endpoint: EndpointId, hashes: array[int], cached_tokens: int, cached_blocks: int, lower: LowerTokens
    ) -> None:
        """The engine had only so many tokens of this prompt, `cached_blocks` of its blocks, where more were placed on
        these tiers."""
        tiers, denied = {tier for tier, _ in lower}, hashes[min(cached_blocks, len(hashes) - 1)]
        if Tier.SHARED in tiers:
            self._proven[EVERY_ENDPOINT, denied] = cached_tokens
        if Tier.DISK in tiers:
            self._proven[endpoint, denied] = cached_tokens

    def believed_tokens(self, endpoint: EndpointId, held: LowerTokens, hashes: array[int]) -> int:
        """Of what a prompt is said to have there, by tier, those nearer than the disk or before the denied ones."""
        tokens, near = count_lower(held), 0
        for tier, here in held:
            if tier in _FAR:
                place = EVERY_ENDPOINT if tier is Tier.SHARED else endpoint
                proven = [self._proven[place, block] for block in hashes if (place, block) in self._proven]
                tokens = min([tokens, *(max(near, each) for each in proven)])
            near += here
        return tokens
