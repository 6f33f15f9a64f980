"""Further choices of a request, which share all of its prompt's blocks by reference and copy the last one on write.

The first choice computes the prompt. With its first token the others begin to decode, without a prefill of their own;
the block in which the prompt ends is copied for each that writes to it while another one uses it.
"""

from __future__ import annotations

from kvproxy.lab.simulator.block_cache import PrefixCache
from kvproxy.lab.simulator.sequence import Sequence


class Forks:
    """Of one scheduler."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._held: dict[str, list[Sequence]] = {}  # sequences by the request whose prompt they wait for
        self._sharers: dict[int, set[str]] = {}  # by the block that is copied on write
        self._tails: dict[str, int] = {}  # by request: that block

    def __bool__(self) -> bool:
        """Return True if some sequence waits for a prompt or shares its last block."""
        return bool(self._held or self._tails)

    @property
    def blocks_to_copy(self) -> int:
        """When all that share a block go on."""
        return sum([len(sharers) - 1 for sharers in self._sharers.values()]) if self._sharers else 0

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence back until the request that it copies begins."""
        self._held.setdefault(sequence.request.copy_of, []).append(sequence)

    def take_held(self, request_id: str) -> list[Sequence]:
        """Return the sequences that wait for this request."""
        return self._held.pop(request_id, [])

    def share_prompt(self, first: Sequence, copy: Sequence, block_size: int) -> None:
        """Share the computed prompt of the first sequence with its copy."""
        self._cache.share(first.blocks)
        copy.blocks = list(first.blocks)
        copy.hashed = first.hashed
        copy.computed = first.computed
        copy.cached_tokens = first.cached_tokens
        copy.admitted_at = first.admitted_at
        copy.generated = 1
        if first.computed % block_size:
            tail = first.blocks[-1]
            for each in (first, copy):
                self._sharers.setdefault(tail, set()).add(each.request.id)
                self._tails[each.request.id] = tail

    def copy_on_write(self, sequence: Sequence) -> None:
        """Copy the last block of a sequence before a write; the caller has ensured a free one if it is shared."""
        tail = self._tails.get(sequence.request.id)
        if tail is not None and len(self._sharers[tail]) > 1:
            [sequence.blocks[-1]] = self._cache.allocate(1)
            self._cache.release([tail])
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that wrote, ended or starts over."""
        request_id = sequence.request.id
        copy_of = sequence.request.copy_of
        if copy_of in self._held and sequence in self._held[copy_of]:
            self._held[copy_of].remove(sequence)
        tail = self._tails.pop(request_id, None)
        if tail is not None:
            self._sharers[tail].discard(request_id)
            if not self._sharers[tail]:
                del self._sharers[tail]
