"""The room an engine has for requests, as its metrics say at each scrape, and the prompt blocks live there.

What waits for memory or for a slot does not wait for prefill, and no ledger of prefill work can see it. A scrape says
what share of the memory the admitted requests hold; that share turns the ledger's count of their prompts into the room
there is for such prompts, shared prefixes and generated tokens included, without either being counted. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

#: From this share of its memory on an engine is asked how much of the ledger's tokens fit; below it the rest says
#: little, and is enough until the next scrape.
MIN_USED_SHARE = 0.5

#: So many requests wait at an engine only where it does not admit them: fewer may have come during its running step.
MIN_WAITING = 4

#: The engine works at once on about this much of what is pending: a step's token budget. With no more pending than this
#: what waits does not wait for prefill.
HEAD_TOKENS = 2048

#: With more of its memory in use than this, what waits may wait for memory and says nothing of slots.
SHORT_SHARE = 0.9

#: A scrape older than this says nothing of the room there is.
MAX_AGE_S = 20.0


class EngineState(msgspec.Struct, frozen=True):
    """What an engine's own metrics said of its memory and its slots at `read_at`. None: this engine does not say."""

    read_at: float
    capacity_tokens: int | None = None  # KV memory
    used_share: float | None = None  # of it, held by running requests; a block that several share counts once
    running: int | None = None  # requests it has admitted
    waiting: int | None = None  # requests it has not admitted yet


class Room(msgspec.Struct, frozen=True):
    """Beyond `tokens` of live prompts, or `requests` in flight, requests wait although the engine has time for them."""

    tokens: float
    requests: float
    read_at: float

    def shortage(self, resident_tokens: float, in_flight: int, now: float) -> float:
        """By what share of the room one more request is too many; 0 where there is room, or nothing is known of late.
        As many of those that hold it have to end first."""
        if now - self.read_at > MAX_AGE_S:
            return 0.0
        return max(0.0, resident_tokens / self.tokens - 1.0, (in_flight + 1) / self.requests - 1.0)


def room_of(state: EngineState, before: Room | None, *, resident_tokens: int, pending_tokens: int) -> Room:
    """The room after a scrape, when the ledger had so many prompt tokens of requests in flight, and so many of them
    still to prefill. The limit of requests stands until more of them run at once."""
    used, running, waiting = state.used_share, state.running or 0, state.waiting or 0
    tokens, admitted = math.inf, resident_tokens - pending_tokens
    if used is not None and used >= MIN_USED_SHARE and admitted > 0:
        tokens = admitted / used
    requests = math.inf if before is None or running > before.requests else before.requests
    memory_left = used is None or used < SHORT_SHARE
    if running and waiting >= MIN_WAITING and pending_tokens <= HEAD_TOKENS and memory_left:
        requests = running
    return Room(tokens, requests, state.read_at)


class LiveBlocks:
    """A ledger by block hash, as large as the prompts in flight. Hashes are chained: a live block's ancestors are live.

    Kept only where a policy asks for it (`Policy.counts_live_blocks`), and told by the load ledger's reservations.
    """

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
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in requests:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, hashes: Sequence[int]) -> None:
        """A request for this prompt begins."""
        requests = self._requests
        for block in hashes:
            requests[block] = requests.get(block, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """A request that was added ends."""
        requests = self._requests
        for block in hashes:
            count = requests[block]
            if count == 1:
                del requests[block]
            else:
                requests[block] = count - 1
