"""The one composition root: a configuration becomes a running proxy."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from types import TracebackType

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.admin.app import admin_app
from kvproxy.admin.history import History
from kvproxy.admin.operated import FindingLike
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.http_probe import HttpProbe
from kvproxy.cluster.routes import Routes
from kvproxy.config.schema import DEFAULT_FILTERS, Config, FilterSpec
from kvproxy.filters.chain import FilterContext, FilterType, Services, WallClock, build_chain
from kvproxy.filters.local_reply import local_reply
from kvproxy.filters.recent import RecentDecisions
from kvproxy.filters.registry import FILTERS, discover
from kvproxy.kvcache.service import KvCache
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock
from kvproxy.upstream.pool import UpstreamPool


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Proxy:
    """The proxy as an ASGI app and an async context manager: inside it, probes and pools run.

    Under somebody else's server the ASGI lifespan enters it. `admin` is the operator's app, for a listener of its own.
    """

    def __init__(
        self,
        config: Config,
        *,
        metrics: Metrics | None = None,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = _utc_now,
        rng: random.Random | None = None,
        extra_filters: Mapping[str, FilterType] | None = None,
    ) -> None:
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        self.draining = False
        self.clock = clock
        self.wall_clock = wall_clock
        self.recent = RecentDecisions()
        self.findings: Sequence[FindingLike] = ()  # what the operator should know, shown on the live page
        rng = random.Random() if rng is None else rng
        pool = config.pool
        self._pool = UpstreamPool(
            max_connections=pool.max_connections,
            max_idle=pool.max_idle,
            idle_timeout_s=pool.idle_timeout,
            max_waiting=pool.max_waiting,
            clock=clock,
            metrics=self.metrics,
        )
        self._probes = UpstreamPool(max_connections=4, max_idle=0, clock=clock)  # a full pool must not starve probes
        self.clusters: dict[str, Cluster] = {
            name: Cluster(
                name,
                settings,
                metrics=self.metrics,
                clock=clock,
                rng=rng,
                probe=HttpProbe(self._probes, settings.health),
            )
            for name, settings in config.clusters.items()
        }
        services = Services(self.clusters, Routes.from_config(config, self.clusters), self._pool)
        context = FilterContext(config, self.metrics, clock, wall_clock, rng, services)
        specs = config.filters or tuple(FilterSpec(name=name) for name in DEFAULT_FILTERS)
        installed = discover({spec.name for spec in specs}) if extra_filters is None else extra_filters
        types = {**installed, **FILTERS}
        self._chain = build_chain(specs, self._not_found, context=context, types=types)
        self._lifetimes = context.lifetimes
        self._kvcaches = context.kvcaches
        history = History(self)
        if config.admin.enabled:
            context.observers.append(self.recent.record)
            self._lifetimes.append(history)
        self.admin: ASGIApp = admin_app(self, history)
        self._running = AsyncExitStack()

    @property
    def kvcache(self) -> KvCache | None:
        """The service behind the `kvcache` filter."""
        return self._kvcaches[0] if self._kvcaches else None

    async def __aenter__(self) -> Proxy:
        await self._running.enter_async_context(self._pool)
        await self._running.enter_async_context(self._probes)
        for cluster in self.clusters.values():
            await self._running.enter_async_context(cluster)
        for lifetime in self._lifetimes:
            await self._running.enter_async_context(lifetime)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._running.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._chain(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What a chain without a router answers."""
        message = "No filter answered this request."
        await local_reply(scope, send, status=404, reason="no_filter", message=message, metrics=self.metrics)


def build(config: Config) -> Proxy:
    """The ASGI app for a configuration. Raises ConfigError with every problem found."""
    return Proxy(config)
