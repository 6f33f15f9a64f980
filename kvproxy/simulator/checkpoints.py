"""Where the engine of a hybrid model keeps the state of its other layers: what it reuses of a prompt ends there."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

#: The KV cache group of these layers, as events number and name it; 0 is that of full attention.
GROUP, KIND = 1, "mamba"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States stand at multiples of `interval_tokens`: at all of them, or with `ends_only` (vLLM's default) at the last
    one of each prompt, and where a prompt was seen to part from what is held."""

    interval_tokens: int
    ends_only: bool = False

    def reusable(self, block_hashes: Sequence[int], held: int, block_size: int, states: Container[int]) -> int:
        """Of `held` leading blocks, those up to the last one at whose end there is a state."""
        step = self.interval_tokens // block_size
        for end in range(held - held % step, 0, -step):
            if block_hashes[end - 1] in states:
                return end
        return 0

    def ends(self, first: int, last: int, *, prompt_tokens: int, parted: int, block_size: int) -> list[int]:
        """Numbers of blocks, over `first` and up to `last`, after which a state is kept. `parted` of them were held
        before, without a state."""
        step = self.interval_tokens // block_size
        if self.ends_only:
            places = {(prompt_tokens - 1) // self.interval_tokens * step, parted - parted % step}
            return sorted(end for end in places if first < end <= last)
        return list(range(first - first % step + step, last + 1, step))
