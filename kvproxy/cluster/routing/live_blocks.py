"""Distinct prompt blocks of the requests in flight at one endpoint. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class LiveBlocks:
    """Ledger by block hash, as large as the prompts in flight. Hashes are chained: a live block's ancestors are live.

    Kept only if a policy needs it (`Policy.counts_live_blocks`), and updated by the load ledger's reservations."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}  # by hash: requests in flight whose prompt has the block

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._requests)

    def __repr__(self) -> str:
        return f"<LiveBlocks {len(self)} distinct of {sum(self._requests.values())}>"

    def count_leading(self, hashes: Sequence[int]) -> int:
        """Leading blocks of a prompt that are live: found by bisection, since what is live is closed under prefixes."""
        requests = self._requests
        low = 0
        high = len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in requests:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, hashes: Sequence[int]) -> None:
        """Count the blocks of a request that begins."""
        requests = self._requests
        for block in hashes:
            requests[block] = requests.get(block, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove the blocks of a request that ends."""
        requests = self._requests
        for block in hashes:
            count = requests[block]
            if count == 1:
                del requests[block]
            else:
                requests[block] = count - 1
