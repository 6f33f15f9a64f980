"""Step in which each engine reuses prompts: its reuse is a multiple of it. Pure.

An engine of a hybrid model needs, beside the KV of a prefix, the state of its other layers at the prefix's end, and
keeps that state at few places: it reuses up to the last of them and computes the rest, however much of the rest its
attention layers hold. The engine reports its own block size, which is a step; the distance of its states is learned
from its reuse."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import gcd

from kvproxy.base.types import EndpointId
from kvproxy.cache.overlap.merge import tolerated_tokens

#: Shorter steps are within the usual error of predictions; blocks of attention layers are mostly shorter.
LEAST_STEP_TOKENS = 128
#: Reuses that a step must explain and no shorter one does, each of another prefix or another length, and of two lengths
#: at least: multiples of a block of 16 tokens are multiples of 128 so often by chance once in 8 ** 7 times.
_PROOFS = 8
_LENGTHS = 2
#: Reuse this far below the held tokens is evidence. Lengths are more exact than at a prediction: from the engine's own
#: count of the prompt.
_SHORT_TOKENS = 32
_SHORT_SHARE = 32
#: Number of the latest reuses, and of those among them that are no multiple of the step, which make it a shorter one; a
#: single one may be another engine's (behind the same address, or blocks loaded from elsewhere).
_WINDOW = 16
_WRONG_AT = 2
MAX_ENDPOINTS = 4096
#: Blocks of text that distinguish prompts: 4 kB, which includes a system prompt that many share.
_BEGINNING = 16


class ReuseSteps:
    """One a cluster; `known` has the endpoints whose step is worth knowing. Bounded by MAX_ENDPOINTS."""

    def __init__(self) -> None:
        self.known: dict[EndpointId, int] = {}
        self._learned: dict[EndpointId, LearnedStep] = {}

    def tell_block_size(self, endpoint: EndpointId, block_tokens: int) -> None:
        """Set the block size of an engine that reuses whole blocks."""
        learned = self._learned.get(endpoint)
        if learned is not None or block_tokens >= LEAST_STEP_TOKENS:
            learned = learned or self._make(endpoint)
            learned.tell(block_tokens)
            self._note(endpoint, learned.tokens)

    def observe_reuse(
        self, endpoint: EndpointId, *, held_tokens: int, cached_tokens: int, blocks: Sequence[int]
    ) -> None:
        """Learn from the engine's reuse of `cached_tokens` of a prompt of which it held an estimated `held_tokens`;
        `blocks` are the chained hashes of the prompt."""
        if cached_tokens <= 0:
            return  # lost, or shorter than a step: no evidence either way
        learned = self._learned.get(endpoint)
        if learned is None:
            if not _is_short(held_tokens, cached_tokens):
                return  # nearly every response of nearly every engine
            learned = self._make(endpoint)
        learned.observe_reuse(held_tokens, cached_tokens, blocks[:_BEGINNING][-1] if blocks else 0)
        self._note(endpoint, learned.tokens)

    def forget_endpoint(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left or is another engine now."""
        self._learned.pop(endpoint, None)
        self.known.pop(endpoint, None)

    def state(self) -> dict[str, tuple[int, int]]:
        """Return the learned and the reported step of each endpoint, for another process."""
        return {str(endpoint): self._learned[endpoint].state for endpoint in self.known}

    def resume(self, state: Mapping[str, tuple[int, int]], *, keep: Container[str]) -> None:
        """Go on from such a state, of the endpoints in `keep`."""
        for name, (tokens, told) in state.items():
            if name in keep and tokens >= LEAST_STEP_TOKENS:
                endpoint = EndpointId(name)
                self._make(endpoint).resume(tokens, told)
                self._note(endpoint, tokens)

    def _make(self, endpoint: EndpointId) -> LearnedStep:
        if len(self._learned) >= MAX_ENDPOINTS:
            self.forget_endpoint(next(iter(self._learned)))
        learned = self._learned[endpoint] = LearnedStep()
        return learned

    def _note(self, endpoint: EndpointId, tokens: int) -> None:
        if tokens > 1:
            self.known[endpoint] = tokens
        else:
            self.known.pop(endpoint, None)


class LearnedStep:
    """One endpoint's. `tokens` is 1 where none is worth knowing.

    A step is longer than assumed if reuse repeatedly falls short of the held tokens, always at a multiple of it, and
    never by more than one step. It is shorter when reuse is no multiple of it."""

    __slots__ = ("_candidate", "_needed", "_proofs", "_told", "_wrong", "_wrong_step", "tokens")

    def __init__(self) -> None:
        self.tokens = self._told = 1
        self._candidate = 0
        self._needed = 0  # least step that explains all evidence
        self._proofs: set[tuple[int, int]] = set()  # reused tokens by prefix
        self._wrong = 0  # a bit for each of the latest reuses
        self._wrong_step = 0  # that would explain those

    @property
    def state(self) -> tuple[int, int]:
        """The learned step, and the reported one."""
        return self.tokens, self._told

    def resume(self, tokens: int, told: int) -> None:
        """Go on from there."""
        self.tokens = tokens
        self._told = told

    def tell(self, block_tokens: int) -> None:
        """Set the reported block size. The same value changes nothing; another one means another engine, or another
        setting."""
        told = block_tokens if block_tokens >= LEAST_STEP_TOKENS else 1
        if told != self._told:
            self._told = told
            self._set(told)

    def observe_reuse(self, held_tokens: int, cached_tokens: int, prefix: int) -> None:
        """Learn from reuse of a part of the held tokens of a prompt."""
        wrong = cached_tokens % self.tokens != 0
        self._wrong = (self._wrong << 1 | wrong) & ((1 << _WINDOW) - 1)
        if wrong:
            self._wrong_step = gcd(self._wrong_step, cached_tokens)
            if self._wrong.bit_count() >= _WRONG_AT:
                self._set(gcd(self.tokens, self._wrong_step))
        elif not self._wrong:
            self._wrong_step = 0
        expected = held_tokens - held_tokens % self.tokens
        if _is_short(expected, cached_tokens):
            self._observe_shortfall(expected, cached_tokens, prefix)
        elif self._candidate and cached_tokens % self._candidate:
            self._drop_candidate()

    def _observe_shortfall(self, expected: int, cached_tokens: int, prefix: int) -> None:
        short = expected - tolerated_tokens(expected) - cached_tokens
        step = gcd(self._candidate, cached_tokens)
        needed = max(self._needed, short, self.tokens)
        if step <= needed:  # of earlier or of this evidence
            self._drop_candidate()
            step = cached_tokens
            needed = max(short, self.tokens)
        if step <= needed or step < LEAST_STEP_TOKENS:
            return  # blocks were lost: no step explains it
        self._candidate = step
        self._needed = needed
        self._proofs.add((cached_tokens, prefix))
        if len(self._proofs) >= _PROOFS and len({length for length, _ in self._proofs}) >= _LENGTHS:
            self._set(step)
        elif len(self._proofs) > _WINDOW:
            self._proofs.pop()

    def _drop_candidate(self) -> None:
        self._candidate = self._needed = 0
        self._proofs.clear()

    def _set(self, tokens: int) -> None:
        self.tokens = tokens if tokens >= LEAST_STEP_TOKENS else 1
        self._wrong = self._wrong_step = 0
        self._drop_candidate()


def _is_short(held_tokens: int, cached_tokens: int) -> bool:
    return cached_tokens + _SHORT_TOKENS + held_tokens // _SHORT_SHARE < held_tokens
