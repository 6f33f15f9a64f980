"""The LMCache service: which it is, and why its lookups stay empty."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

import httpx

from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.base.types import Clock, Sleep
from kvproxy.features.lmcache.controller import CHUNK_TOKENS, LMCacheController
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.provider import Provider
from kvproxy.features.lmcache.settings import LMCacheSettings, ServiceKind, strategy_of

log = logging.getLogger("kvproxy.kvcache")

#: Pause before a service that did not answer at the start is queried again.
AGAIN_S = 5.0


class Connection:
    """Connection to the lookup service. From the first moment lookups go to the configured kind (with `auto`: a
    controller, until a coordinator identifies itself). `run` is for a task of its own."""

    def __init__(
        self,
        settings: LMCacheSettings,
        http: httpx.AsyncClient,
        *,
        lookups: LookupClient,
        known_instances: Callable[[], Collection[str]],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        timeout_s = settings.request_timeout
        url = settings.lmcache_endpoint
        self._kind = settings.provider
        self._coordinator = LMCacheCoordinator(http, url, model=settings.directory_model, timeout_s=timeout_s)
        self._controller = LMCacheController(http, url, places=strategy_of(settings), timeout_s=timeout_s)
        self._lookups = lookups
        self._known_instances = known_instances
        self._sleep = sleep
        lookups.provider = self._coordinator if self._kind is ServiceKind.COORDINATOR else self._controller

    async def run(self) -> None:
        """Until the service has answered once. Never raises but for cancellation."""
        said = False
        while (provider := await self._answering()) is None:
            if not said:
                said = True
                log.warning("[kvcache] LMCache does not answer; requests are routed without it until it does")
            await self._sleep(AGAIN_S)
        self._lookups.provider = provider
        log.info("[kvcache] lookups go to %s", provider.source)
        await check_provider(provider, self._known_instances())

    async def _answering(self) -> Provider | None:
        """Return the kind of service that answers; None if none does."""
        try:
            coordinator = await self._coordinator.answers()
        except ClientError:
            return None
        if self._kind is ServiceKind.AUTO:
            return self._coordinator if coordinator else self._controller
        return self._lookups.provider


#: Prompts that an engine reused and no lookup ever named before that is worth a warning.
CONTRADICTIONS = 3
#: ...and how long after the first of them: engines report stored chunks to LMCache with a delay, so that a burst of
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
    """Warns once when engines keep reusing prompts that are missing in the lookup service."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._contradictions = 0
        self._first_at = 0.0
        self._said = False

    def observe_lookup(self, *, cached_tokens: int, holders_named: int, ever_hit: bool) -> None:
        """Observe a looked-up prompt that was served, `cached_tokens` of it from a cache."""
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
