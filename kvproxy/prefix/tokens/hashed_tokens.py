"""Token ids of one prompt together with their block hashes, worked out once."""

from __future__ import annotations

from array import array

from kvproxy.prefix.hashing import chain, token_bytes

#: Ways of hashing (block size and seed) kept of one prompt: an engine has one, a mixed fleet a few.
MAX_WAYS = 4


class HashedTokens:
    """Neither the tokens nor a result is to be changed.

    Whoever is told `grown_from` continues its hashes for as long as its tokens are the same, at once, so that nobody
    waits for it later.
    """

    __slots__ = ("_blocks", "tokens")

    def __init__(self, tokens: array[int], *, grown_from: HashedTokens | None = None, given_up: int = 0) -> None:
        self.tokens = tokens
        self._blocks: dict[tuple[int, int], array[int]] = {}
        if grown_from is not None:
            self._continue(grown_from, given_up)

    def blocks(self, block_size: int, seed: int) -> array[int]:
        """As `hashing.token_blocks` of all tokens."""
        way = (block_size, seed)
        blocks = self._blocks.get(way)
        if blocks is None:
            if len(self._blocks) >= MAX_WAYS:
                del self._blocks[next(iter(self._blocks))]
            blocks = self._blocks[way] = chain(token_bytes(self.tokens), 4 * block_size, seed)
        return blocks

    def leading_blocks(self, block_size: int, seed: int, tokens: int) -> array[int]:
        """The same of the first `tokens` only."""
        blocks, count = self.blocks(block_size, seed), tokens // block_size
        return blocks if count >= len(blocks) else blocks[:count]

    def _continue(self, earlier: HashedTokens, given_up: int) -> None:
        same = max(0, len(earlier.tokens) - given_up)
        if not earlier._blocks or self.tokens[:same] != earlier.tokens[:same]:
            return
        data = token_bytes(self.tokens)
        for (block_size, seed), blocks in earlier._blocks.items():
            kept = blocks[: same // block_size]
            parent = kept[-1] if kept else seed
            rest = chain(data, 4 * block_size, parent, start=4 * block_size * len(kept))
            self._blocks[block_size, seed] = kept + rest
