"""The kvcache service of a middleware, in the event loops of its host."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import NamedTuple

from starlette.types import ASGIApp

from kvproxy.base.background_task import find_loop
from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.feature import find_reports
from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import RouteTarget
from kvproxy.embed.read_ahead import ReadAhead
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature
from kvproxy.operate.runtime.generation import StateStore
from kvproxy.proxy.filters.chain import FilterContext, RequestGuard, Services
from kvproxy.proxy.filters.kvcache import KvCacheFilter
from kvproxy.proxy.request.body import HeldBodies

log = logging.getLogger("kvproxy.kvcache")

#: Time after a failed start in which requests pass without facts.
RETRY_S = 60.0

#: Running ones: two with equal endpoints learn separately.
_running: weakref.WeakSet[HostedService] = weakref.WeakSet()


class Filters(NamedTuple):
    """Those of the proxy that requests pass here, and checks of features."""

    reading: ReadAhead
    facts: KvCacheFilter
    guards: Sequence[RequestGuard]


#: Makes them for one event loop, to which their locks and timers belong.
MakeFilters = Callable[[KvCache, Sequence[RequestGuard]], Filters]


class Life:
    """The service and its filters in one event loop; neither while it does not run there."""

    __slots__ = ("changing", "ended", "filters", "holders", "running")

    def __init__(self) -> None:
        self.changing = asyncio.Lock()  # held while it starts or ends
        self.running = contextlib.AsyncExitStack()  # the service and its guards
        self.filters: Filters | None = None
        self.holders = 0  # lifespans and `async with` blocks; it ends with the last
        self.ended = False  # ended on purpose: a late request does not start it again


class HostedService:
    """A new service for each event loop it is used in, which goes on with what earlier ones learned."""

    def __init__(
        self,
        app: ASGIApp,
        settings: KvCacheSettings,
        *,
        config: Config,
        cluster: Cluster,
        held: HeldBodies,
        make_filters: MakeFilters,
        metrics: Metrics,
        clock: Clock,
        rng: Random,
    ) -> None:
        self._app = app
        self._settings = settings
        self._config = config
        self._cluster = cluster
        self._held = held
        self._make_filters = make_filters
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        clusters = {cluster.name: cluster}
        self._make = partial(KvCache, settings, clusters=clusters, metrics=metrics, clock=clock, rng=rng)
        #: That of the latest start; its learned state goes on in the next.
        self.service = self._make()
        self._lives: dict[asyncio.AbstractEventLoop, Life] = {}
        self._retry_at = float("-inf")
        self._no_asyncio = False

    @property
    def runs(self) -> bool:
        """Whether it runs in an event loop that runs."""
        return any(loop.is_running() and life.filters is not None for loop, life in self._lives.items())

    async def enter(self) -> None:
        """Start it, for a holder more. Raises what its parts raise."""
        life = self._life()
        if life is None:
            raise RuntimeError("this KVCacheMiddleware runs in another event loop; make one for each loop")
        async with life.changing:
            if self._settings.enabled:
                await self._start(life)
            life.holders += 1

    async def leave(self) -> None:
        """End it with its last holder."""
        life = self._lives.get(find_loop()) if self._lives else None
        if life is None:
            return
        async with life.changing:
            life.holders -= 1
            if life.holders <= 0:
                life.filters = None
                life.ended = True
                life.holders = 0
                _running.discard(self)
                await life.running.aclose()

    async def hold(self) -> None:
        """Start it with the host, which may have started and ended before."""
        life = self.find_life()
        if life is not None:
            life.ended = False
            life.holders += 1
            await self.start_late(life)

    def find_life(self) -> Life | None:
        """Return that of the running event loop. None if another thread runs the service in a loop of its own, if it is
        switched off, or, with a line in the log, under trio."""
        if not self._settings.enabled:
            return None
        try:
            return self._life()
        except RuntimeError as error:
            if not self._no_asyncio:
                log.warning("[kvcache] %s: requests pass without facts", error)
            self._no_asyncio = True
            return None

    async def start_late(self, life: Life) -> Filters | None:
        """Return the filters; None if the service does not run here. Without lifespan events the first request
        starts it."""
        if not life.ended:
            async with life.changing:
                if life.filters is None and self._clock() >= self._retry_at:
                    try:
                        await self._start(life)
                    except Exception:
                        self._retry_at = self._clock() + RETRY_S
                        what = "the service cannot start: requests pass without facts; next try in"
                        log.exception("[kvcache] %s %g s", what, RETRY_S)
        return life.filters

    def _life(self) -> Life | None:
        """Return that of the running event loop. None if another thread runs the service in a loop of its own: nothing
        of it may be touched from here. RuntimeError under trio."""
        loop = find_loop()
        life = self._lives.get(loop)
        if life is None:
            self._lives = {other: one for other, one in self._lives.items() if not other.is_closed()}
            if any(other.is_running() for other in self._lives):
                return None
            life = self._lives[loop] = Life()
        return life

    async def _start(self, life: Life) -> None:
        if life.filters is None:
            life.ended = False
            # Its own tasks do not inherit the context of the request that happened to start it.
            await asyncio.get_running_loop().create_task(self._start_parts(life), context=contextvars.Context())

    async def _start_parts(self, life: Life) -> None:
        async with contextlib.AsyncExitStack() as starting:
            reports = await starting.enter_async_context(self._follow_reports())
            service = self._make(state=self.service.state, reports=reports)
            await starting.enter_async_context(service)
            guards = await starting.enter_async_context(self._guards(service))
            life.running = starting.pop_all()
        service.bind_gauges()
        self.service = service
        life.filters = self._make_filters(service, guards)
        same = [other for other in _running if other is not self and other._is_twin(self._cluster)]
        if same:
            log.warning(
                "[kvcache] %d middlewares run with equal endpoints and learn separately: wrap the outermost app once",
                len(same) + 1,
            )
        _running.add(self)

    def _follow_reports(self) -> EngineReports:
        follows = find_reports(self._settings)
        if follows is None:
            return EngineReports({})
        return follows({self._cluster.name: self._cluster}, metrics=self._metrics, clock=self._clock)

    @contextlib.asynccontextmanager
    async def _guards(self, service: KvCache) -> AsyncIterator[Sequence[RequestGuard]]:
        """Run the checks of features, which need the engines' versions."""
        services = Services({self._cluster.name: self._cluster}, OneCluster(self._cluster), service.pool, self._held)
        context = FilterContext(
            self._config,
            self._metrics,
            self._clock,
            lambda: datetime.now(UTC),
            self._rng,
            services,
            StateStore().draft_states(),
        )
        for feature in installed(Feature):
            for _, kind in feature.list_guards(self._config):
                kind.build(self._app, None, context)
        async with contextlib.AsyncExitStack() as running:
            for lifetime in context.lifetimes:
                await running.enter_async_context(lifetime)
            for bind in context.on_serving:
                bind()
            yield tuple(context.guards)

    def _is_twin(self, cluster: Cluster) -> bool:
        """Return whether it runs in this event loop for the same engines."""
        life = self._lives.get(asyncio.get_running_loop())
        urls = {str(one.origin) for one in self._cluster.endpoints}
        return life is not None and life.filters is not None and urls == {str(one.origin) for one in cluster.endpoints}


class OneCluster:
    """Routes that all lead to one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._target = RouteTarget(cluster)

    def resolve(self, path: str, model: str) -> RouteTarget:
        return self._target
