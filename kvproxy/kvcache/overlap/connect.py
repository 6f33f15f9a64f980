"""Finds out which LMCache service there is, and checks it once it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

import httpx

from kvproxy.clients.lmcache.controller import LMCacheControllerClient
from kvproxy.clients.lmcache.coordinator import LMCacheCoordinatorClient
from kvproxy.config import kvcache_schema as schema
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.errors import ClientError
from kvproxy.kvcache.feedback.selfcheck import check_provider
from kvproxy.kvcache.overlap.lookup import LookupClient
from kvproxy.kvcache.providers import ControllerProvider, CoordinatorProvider, Provider, is_coordinator
from kvproxy.types import Sleep

log = logging.getLogger("kvproxy.kvcache")

#: A service that does not answer at the start is asked again after this long.
AGAIN_S = 5.0


class Connection:
    """From the first moment lookups go to what the settings name (with `auto`: a controller, until a coordinator says
    that it is one). `run` is for a task of its own."""

    def __init__(
        self,
        settings: KvCacheSettings,
        http: httpx.AsyncClient,
        *,
        lookups: LookupClient,
        known_instances: Callable[[], Collection[str]],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        timeout_s = settings.request_timeout
        url = settings.lmcache_endpoint
        coordinator = LMCacheCoordinatorClient(http, url, lookup_timeout_s=timeout_s, action_timeout_s=timeout_s)
        controller = LMCacheControllerClient(http, url, lookup_timeout_s=timeout_s, action_timeout_s=timeout_s)
        self._kind = settings.provider
        self._coordinator_client = coordinator
        self._coordinator: Provider = CoordinatorProvider(coordinator, model=settings.directory_model)
        self._controller: Provider = ControllerProvider(controller, settings.cache_strategy)
        self._lookups = lookups
        self._known_instances = known_instances
        self._sleep = sleep
        lookups.provider = self._coordinator if self._kind is schema.Provider.COORDINATOR else self._controller

    async def run(self) -> None:
        """Until the service has answered once. Never raises but for cancellation."""
        said = False
        while (provider := await self._answering()) is None:
            if not said:
                said = True
                log.warning("[kvcache] LMCache does not answer; requests are routed without it until it does")
            await self._sleep(AGAIN_S)
        self._lookups.provider = provider
        log.info("[kvcache] lookups go to %s", provider.source.value)
        await check_provider(provider, self._known_instances())

    async def _answering(self) -> Provider | None:
        """Which service answers; None when none does."""
        try:
            coordinator = await is_coordinator(self._coordinator_client)
        except ClientError:
            return None
        if self._kind is schema.Provider.AUTO:
            return self._coordinator if coordinator else self._controller
        return self._lookups.provider
