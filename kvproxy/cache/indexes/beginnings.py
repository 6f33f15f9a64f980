"""Matches of beginnings that many prompts share, kept from one prompt to the next.

To ask every source about every prompt would take most of a decision among hundreds of engines. Where nearly all of them
hold a common beginning (a system prompt), a prompt only has to ask those that changed since, and those that may hold
more of it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import compress, repeat
from operator import contains

import msgspec

from kvproxy.base.types import EndpointId, LowerTokens, count_lower
from kvproxy.cache.indexes.block_table import BlockTable
from kvproxy.cache.indexes.run_matches import Firsts, block_after

#: Beginnings kept, and those seen once. A kept one takes a few hundred bytes for each source.
MAX_KEPT = 32
_MAX_SEEN = 256
#: Different matches of one beginning that are shared.
_MAX_SHARED = 256


class PreciseMatch(msgspec.Struct, frozen=True):
    """Leading tokens one endpoint holds: in engine memory, then further ones on lower tiers; on its best rank."""

    device_tokens: int
    lower: LowerTokens
    dp_rank: int

    @property
    def tokens(self) -> int:
        """Contiguous tokens over all tiers."""
        return self.device_tokens + count_lower(self.lower)

    def is_better(self, other: PreciseMatch) -> bool:
        """Return True if this match is better for its endpoint."""
        return (self.tokens, self.device_tokens, -self.dp_rank) > (other.tokens, other.device_tokens, -other.dp_rank)


#: Match of an endpoint that holds so many leading blocks of a prompt on the device, and so many in all.
MakeMatch = Callable[[EndpointId, "array[int]", int, int], PreciseMatch]


class Beginning:
    """Blocks that many endpoints hold: the match of each with them, and which endpoints may hold more."""

    __slots__ = ("after", "followed_by", "found", "hashes", "read", "shared", "whole")

    def __init__(self, hashes: array[int]) -> None:
        self.hashes = hashes
        self.found: dict[EndpointId, PreciseMatch] = {}
        #: Endpoints that hold all of it, with the runs they may hold of what follows.
        self.whole: dict[EndpointId, Firsts] = {}
        #: The next block in the run that the beginning ends in, by endpoint, and the endpoints by that block.
        self.after: dict[EndpointId, int] = {}
        self.followed_by: dict[int, dict[EndpointId, None]] = {}
        self.shared: dict[PreciseMatch, PreciseMatch] = {}
        self.read = 0  # number of the latest change that counts in here

    def forget(self, endpoint: EndpointId) -> None:
        """Forget an endpoint's match."""
        self.found.pop(endpoint, None)
        self.whole.pop(endpoint, None)
        after = self.after.pop(endpoint, None)
        if after is not None:
            others = self.followed_by[after]
            del others[endpoint]
            if not others:
                del self.followed_by[after]

    def enter(self, endpoint: EndpointId, match: PreciseMatch, blocks: int, table: BlockTable) -> None:
        """Enter an endpoint that holds that many of the blocks."""
        if len(self.shared) >= _MAX_SHARED:
            self.shared.clear()
        self.found[endpoint] = self.shared.setdefault(match, match)
        if blocks < len(self.hashes):
            return
        self.whole[endpoint] = table.firsts
        after = block_after(table.firsts, self.hashes)
        if after is not None:
            self.after[endpoint] = after
            self.followed_by.setdefault(after, {})[endpoint] = None


class Beginnings:
    """Of one set of endpoints, each with one table of blocks of one size. A beginning is kept when the second prompt
    comes of which at least `many` endpoints hold just that."""

    def __init__(self, tables: Mapping[EndpointId, BlockTable], make_match: MakeMatch, *, many: int) -> None:
        self._tables = tables
        self._make_match = make_match
        self._many = many
        self._nothing = Beginning(array("Q"))  # what every prompt begins with
        self._nothing.whole = {endpoint: table.firsts for endpoint, table in tables.items()}
        self._kept: dict[int, Beginning] = {}  # by last block, the longest unused first
        self._lengths: list[int] = []  # of these in blocks, the longest first
        self._seen: dict[int, None] = {}
        self._changes = 0
        self._changed: dict[EndpointId, int] = {}  # number of its latest change, the latest last

    def note_change(self, endpoint: EndpointId) -> None:
        """Note that the endpoint's blocks have changed."""
        if self._kept:
            self._changes += 1
            self._changed.pop(endpoint, None)
            self._changed[endpoint] = self._changes

    def match_prompt(self, hashes: array[int]) -> dict[EndpointId, PreciseMatch]:
        """Return the match of each endpoint that holds anything."""
        known = self._find(hashes)
        found = known.found.copy()
        depth = len(known.hashes)
        if depth == len(hashes):
            return found
        block = hashes[depth]
        further = list(compress(known.whole, map(contains, known.whole.values(), repeat(block))))
        further += known.followed_by.get(block, ())
        shared: dict[int, PreciseMatch] = {}  # by blocks, where all are on the device
        lengths = []
        guess = 0
        tables = self._tables
        for endpoint in further:
            device, blocks, guess = tables[endpoint].match(hashes, guess)
            if not blocks:
                continue
            lengths.append(blocks)
            match = shared.get(blocks) if blocks == device else None
            if match is None:
                match = self._make_match(endpoint, hashes, device, blocks)
                if blocks == device:
                    shared[blocks] = match
            found[endpoint] = match
        if len(lengths) >= self._many:
            self._learn(hashes, lengths)
        return found

    def _find(self, hashes: array[int]) -> Beginning:
        """Return the longest kept beginning of the prompt, as of now."""
        for length in self._lengths:
            if length <= len(hashes):
                name = hashes[length - 1]
                known = self._kept.pop(name, None)
                if known is not None:
                    self._kept[name] = known
                    if known.read != self._changes:
                        self._renew(known)
                    return known
        return self._nothing

    def _renew(self, known: Beginning) -> None:
        read = known.read
        known.read = self._changes
        for endpoint in reversed(self._changed):
            if self._changed[endpoint] <= read:
                return
            self._match_again(known, endpoint)

    def _match_again(self, known: Beginning, endpoint: EndpointId) -> None:
        known.forget(endpoint)
        table = self._tables[endpoint]
        device, blocks, _ = table.match(known.hashes)
        if blocks:
            known.enter(endpoint, self._make_match(endpoint, known.hashes, device, blocks), blocks, table)

    def _learn(self, hashes: array[int], lengths: list[int]) -> None:
        """Keep the beginning that most of these hold, if it was seen before."""
        length, count = Counter(lengths).most_common(1)[0]
        name = hashes[length - 1]
        if count < self._many or name in self._kept:
            return
        if name not in self._seen:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[name] = None
            return
        del self._seen[name]
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        known = self._kept[name] = Beginning(hashes[:length])
        known.read = self._changes
        for endpoint in self._tables:
            self._match_again(known, endpoint)
        self._lengths = sorted({len(one.hashes) for one in self._kept.values()}, reverse=True)
