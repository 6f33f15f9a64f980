"""Prompts whose answers have no usage, as streams whose clients did not ask for it."""

from __future__ import annotations

import random

from kvproxy.base.bounded import BoundedMapping
from kvproxy.cache.feedback.token_counts import BytesPerToken
from kvproxy.cache.overlap.facts import RequestFacts

#: Shorter prompts are mostly template, and hold little memory.
_LEAST_BYTES = 2048
#: Share of a model's prompts that are counted once one was tried.
_SHARE = 1 / 64
_MAX_MODELS = 256


class UncountedPrompts:
    """Choice of those that an engine's tokenizer is to count, so that bytes per token are known all the same: the first
    one of a model, then one in 64."""

    def __init__(self, bytes_per_token: BytesPerToken, *, rng: random.Random) -> None:
        self._bytes_per_token = bytes_per_token
        self._rng = rng
        self._tried: BoundedMapping[str, None] = BoundedMapping(_MAX_MODELS)

    def choose(self, facts: RequestFacts) -> bool:
        """Return whether this one is to be counted."""
        if facts.text_bytes < _LEAST_BYTES:
            return False
        known = facts.model in self._tried or self._bytes_per_token.knows(facts.model)
        if known and self._rng.random() >= _SHARE:
            return False
        self._tried[facts.model] = None
        return True
