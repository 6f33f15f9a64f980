"""Copies made lately: LMCache's services learn of one a second later, or (the controller) never."""

from __future__ import annotations

from cachetools import TTLCache
from xxhash import xxh3_64_intdigest

from kvproxy.base.types import Clock, Tier
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.store import Holder, Prefix

#: How long, and for how many beginnings of prompts, copies are kept; full memory may have lost them by then.
_KEPT_S = 60.0
_KEPT = 10_000
#: Tokens by which beginnings are told apart: LMCache's default chunk.
_BEGINNING_TOKENS = 256


class RecentCopies:
    """Where beginnings of prompts were copied to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: By a prompt's beginning, for each instance: tokens that were copied there, their digest, and when.
        self._copied: TTLCache[tuple[str, str, int], dict[str, tuple[int, int, float]]] = TTLCache(
            _KEPT, _KEPT_S, timer=clock
        )

    def note_copy(self, instance: str, prefix: Prefix, tokens: int) -> None:
        """So many of its leading tokens are in the memory of `instance` now."""
        where = _beginning(prefix)
        now = self._clock()
        known = {name: one for name, one in self._copied.get(where, {}).items() if now - one[2] < _KEPT_S}
        self._copied[where] = {**known, instance: (tokens, _digest(prefix.tokens[:tokens]), now)}

    def find_holders(self, prefix: Prefix) -> list[Holder]:
        """Where its beginning was copied lately."""
        if not self._copied:
            return []
        tokens = prefix.tokens
        now = self._clock()
        return [
            Holder(instance, count, True, ((Tier.HOST, count),))
            for instance, (count, digest, at) in self._copied.get(_beginning(prefix), {}).items()
            if now - at < _KEPT_S and len(tokens) >= count and _digest(tokens[:count]) == digest
        ]


def _beginning(prefix: Prefix) -> tuple[str, str, int]:
    return prefix.model, prefix.cache_salt, _digest(prefix.tokens[:_BEGINNING_TOKENS])


def _digest(tokens: TokenIds) -> int:
    return xxh3_64_intdigest(tokens.tobytes())
