"""Says why lookups stay empty: once at the start, and when the engines contradict."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from kvproxy.clients.lmcache.controller import CHUNK_TOKENS
from kvproxy.errors import ClientError, NotSupported
from kvproxy.kvcache.providers import Provider
from kvproxy.types import Clock

log = logging.getLogger("kvproxy.kvcache")

#: Prompts that an engine reused and no lookup ever named before that is worth a warning.
CONTRADICTIONS = 3
#: ...and how long after the first of them: engines tell LMCache what they store a little later, so that a burst of
#: alike prompts to a fresh fleet is reused before any lookup can name it.
PATIENCE_S = 10.0

_CAUSES = (
    "check that the engines store to LMCache at all, that controller and engines run with the same PYTHONHASHSEED and "
    "the same vLLM importable, that the chunk size is 256, and that instances send heartbeats"
)


async def check_provider(provider: Provider, known: Collection[str]) -> None:
    """One line for each thing that will keep lookups empty. Never raises."""
    try:
        registered = await provider.instances()
        chunks = await provider.indexed_chunks()
    except NotSupported:
        log.info("[kvcache] this LMCache does not list its instances: ids are checked as lookups name them")
        return
    except ClientError as error:
        log.warning("[kvcache] LMCache cannot be checked: %s", error)
        return
    names = ", ".join(sorted(known)) or "none"
    if not registered:
        log.warning("[kvcache] no instance is registered at LMCache: lookups stay empty until engines register")
    for instance in sorted(registered - set(known)):
        log.warning("[kvcache] the LMCache instance %r is no endpoint's instance_id; known: %s", instance, names)
    for instance in sorted(set(known) - registered if registered else ()):
        log.warning("[kvcache] the endpoint with instance_id %r is not registered at LMCache", instance)
    if registered and not chunks:
        log.info("[kvcache] LMCache's index is empty, as it is after a start; if it stays so: %s", _CAUSES)


class EmptyLookups:
    """Warns once when engines keep reusing prompts that the lookup service knows nothing of."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._contradictions = 0
        self._first_at = 0.0
        self._said = False

    def observe(self, *, cached_tokens: int, holders_named: int, ever_hit: bool) -> None:
        """A looked-up prompt was served, `cached_tokens` of it from a cache."""
        if ever_hit or self._said or holders_named or cached_tokens < CHUNK_TOKENS:
            return
        now = self._clock()
        if not self._contradictions:
            self._first_at = now
        self._contradictions += 1
        if self._contradictions >= CONTRADICTIONS and now - self._first_at >= PATIENCE_S:
            self._said = True
            log.warning(
                "[kvcache] engines reuse prompts (%d tokens just now) that LMCache's lookup has never named: %s",
                cached_tokens,
                _CAUSES,
            )
