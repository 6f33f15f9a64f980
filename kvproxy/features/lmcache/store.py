"""LMCache as the store beside the engines: lookups under the routing deadline, and actions after responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Self

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import ClientError
from kvproxy.base.settings.compose import part_of
from kvproxy.cache.feature import CacheParts
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.merge import HolderOverlap
from kvproxy.cache.store import Action, ActionKind, FindHolders, HotPin, KvStore, OnDone, OnOver, Prefix
from kvproxy.cluster.routing.policy import FactSource
from kvproxy.features.lmcache.connection import Connection
from kvproxy.features.lmcache.executor import ActionExecutor
from kvproxy.features.lmcache.lookup_task import LookupTask
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.settings import LMCacheSettings, strategy_of
from kvproxy.features.lmcache.strategy_runner import StrategyRunner

log = logging.getLogger("kvproxy.kvcache")


class LMCacheStore(KvStore):
    """The LMCache service at `lmcache_endpoint`."""

    def __init__(self, parts: CacheParts) -> None:
        settings = part_of(parts.settings, LMCacheSettings)
        strategy = strategy_of(settings)
        super().__init__(address=settings.lmcache_endpoint, pin_renewal_s=strategy.pin_renewal_s)
        self._settings = settings
        self._parts = parts
        self.lookups = LookupClient(breakers=parts.breakers, metrics=parts.metrics, clock=parts.clock)
        self.lookup_task = LookupTask(
            settings,
            tokens=parts.overlap.tokens,
            lookups=self.lookups,
            known_instances=parts.overlap.instance_ids,
            find_more=lambda: self.find_more,
            metrics=parts.metrics,
            clock=parts.clock,
        )
        self.executor = ActionExecutor(
            dry_run=strategy.dry_run,
            jobs=parts.actions.jobs,
            lookups=self.lookups,
            breakers=parts.breakers,
            locks=lambda: self.locks,
            metrics=parts.metrics,
            clock=parts.clock,
            rng=parts.rng,
        )
        self.strategies = StrategyRunner(parts, self) if strategy.enabled else None
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        parts = self._parts
        http = parts.engines.http.client()
        connection = Connection(self._settings, http, lookups=self.lookups, known_instances=parts.overlap.instance_ids)
        self._running.push_async_callback(self.lookup_task.close)
        task = asyncio.create_task(connection.run(), name="kvcache connect")
        self._running.push_async_callback(cancel_tasks, [task])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    @property
    def source(self) -> FactSource | None:
        provider = self.lookups.provider
        return None if provider is None else provider.source

    @property
    def possible(self) -> bool:
        return self.lookups.possible

    @property
    def supported(self) -> frozenset[ActionKind]:
        provider = self.lookups.provider
        return frozenset() if provider is None else provider.supports

    @property
    def copies(self) -> bool:
        provider = self.lookups.provider
        return provider is not None and provider.copies

    def is_wanted(self, facts: RequestFacts) -> bool:
        return self.lookup_task.is_wanted(facts)

    async def look_up(self, facts: RequestFacts) -> Sequence[HolderOverlap]:
        """Leave out the holders where something must be undone first, which begins now."""
        holders = await self.lookup_task.ask(facts)
        strategies = self.strategies
        if strategies is None:
            return holders
        instances = {endpoint.id: endpoint.instance_id for endpoint in facts.endpoints}
        return [one for one in holders if not strategies.undo(facts.keys, instances[one.endpoint])]

    def add_holders(self, facts: RequestFacts, find: FindHolders) -> None:
        if facts.tokens is None or self.lookups.provider is None:
            return
        found = find(Prefix(facts.tokens, facts.model, facts.request.cache_salt or ""))
        facts.lookup_overlaps = [*self.lookup_task.count_overlaps(facts, found), *facts.lookup_overlaps]

    async def read_memory(self) -> None:
        provider = self.lookups.provider
        if provider is None:
            return
        try:
            self.memory = await provider.memory()
        except ClientError as error:
            log.debug("[kvcache] memory of LMCache: %s", error)

    def can_do(self, action: Action) -> bool:
        return action.kind in self.supported and not self.executor.is_disabled(action)

    def submit(self, action: Action, on_done: OnDone, on_over: OnOver | None = None) -> bool:
        return self.executor.submit(action, on_done, on_over)

    def list_pins(self, now: float) -> Mapping[tuple[str, int], HotPin]:
        return {} if self.strategies is None else self.strategies.list_pins(now)
