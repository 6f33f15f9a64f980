"""The one composition root: a configuration becomes a running proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.metrics.present import LoopLag
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.types import Clock
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import Routes, show_learned
from kvproxy.operate.admin.history import History
from kvproxy.operate.admin.operated import AdviceRuns, ConfigReloader, OperatorFinding, Reloaded
from kvproxy.operate.companion import Companion, Siblings
from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature
from kvproxy.operate.metrics.catalog import make_metrics
from kvproxy.operate.metrics.process import ProcessMetrics
from kvproxy.operate.receipts.recorder import make_recorder
from kvproxy.operate.receipts.writer import WritingObserver
from kvproxy.operate.runtime.generation import Shared
from kvproxy.operate.runtime.generations import Generations
from kvproxy.proxy.filters import kvcache
from kvproxy.proxy.filters.chain import FilterType, WallClock
from kvproxy.proxy.filters.registry import discover
from kvproxy.proxy.forward.public import NO_WEBSOCKET
from kvproxy.proxy.request.body import HeldBodies
from kvproxy.proxy.request.error_reply import error_body
from kvproxy.proxy.request.observer import RecentDecisions

if TYPE_CHECKING:
    from kvproxy.operate.admin.app import AccessControl

log = logging.getLogger("kvproxy")


#: Configuration in Python code: a loaded one, the path of a file, or the data of a file.
ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Proxy:
    """The proxy as an ASGI app and an async context manager: inside it, probes and pools run.

    `config` is a path (`Proxy("config.yaml")`), plain data (`Proxy({"endpoints": {"a": "http://a:8000"}})`) or a loaded
    configuration; ConfigError names every error of it. Under another server the ASGI lifespan enters the proxy.
    `admin` is the operator's app, for a listener of its own.
    """

    def __init__(
        self,
        config: ConfigLike,
        *,
        metrics: Metrics | None = None,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = _utc_now,
        rng: random.Random | None = None,
        extra_filters: Mapping[str, FilterType] | None = None,
        receipts_key: bytes | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        config = read_config(config, extra_filters)
        self.metrics = make_metrics() if metrics is None else metrics
        self.draining = False
        self.clock = clock
        self.wall_clock = wall_clock
        self.recent = RecentDecisions()
        self.findings: Sequence[OperatorFinding] = ()  # findings for the operator, shown on the live page
        self.public_url = ""  # URL for clients, set by the listener
        self.reloader: ConfigReloader | None = None  # reloads the file; None: there is no file
        self.adviser: AdviceRuns | None = None  # likewise
        self.certificates = CertificateWatch(
            metrics=self.metrics, wall_clock=lambda: wall_clock().timestamp()
        )  # of its listeners and towards engines
        self._pool = _make_pool(config, clock=clock, metrics=self.metrics, certificates=self.certificates)
        # A full pool must not starve probes.
        self._probes = UpstreamPool(max_connections=4, max_idle=0, clock=clock, certificates=self.certificates)
        recorder = make_recorder(self, config.receipts, key=receipts_key)
        self._written = [*(() if recorder is None else (recorder,)), *_observe_requests(self, config)]
        #: Observers of every request.
        self.observers = (*((self.recent,) if config.admin.enabled else ()), *self._written)
        #: The count of all bodies held.
        self.bodies = HeldBodies(config.limits.bodies, metrics=self.metrics)
        shared = Shared(
            self.metrics,
            clock,
            wall_clock,
            random.Random() if rng is None else rng,
            self._pool,
            self._probes,
            extra_filters,
            self.observers,
            self.bodies,
        )
        self.generations = Generations(config, shared, certificates=self.certificates)
        show_learned(self.metrics, lambda: self.clusters.values(), clock=clock)
        self.generations.companions = self.companions = tuple(_accompany(self, config, siblings))
        self._history = History(self)
        self._running = AsyncExitStack()
        self._began = False
        self._beginning = asyncio.Lock()

    @cached_property
    def admin(self) -> AccessControl:
        """The operator's app. (Made on first use: who embeds the proxy without it loads none of its code.)"""
        from kvproxy.operate.admin.app import build_admin_app

        return build_admin_app(self, self._history)

    @property
    def config(self) -> Config:
        """Present configuration."""
        return self.generations.current.config

    @property
    def clusters(self) -> dict[str, Cluster]:
        """Clusters by name."""
        return self.generations.current.clusters

    @property
    def routes(self) -> Routes:
        """Routes from requests to clusters."""
        return self.generations.current.routes

    @property
    def running(self) -> int:
        """Open requests, of the configuration it serves by now."""
        return self.generations.current.running

    @property
    def replaced(self) -> int:
        """Configurations that were replaced and have ended."""
        return self.generations.ended

    @property
    def kvcache(self) -> KvCache | None:
        """The service behind the `kvcache` filter."""
        return self.generations.current.kvcaches.get(kvcache.NAME)

    async def reload(self, config: Config) -> Reloaded:
        """Serve by this configuration from now on; running requests finish by the one before.

        Unchanged parts stay as they are: endpoints with their loads, learned speeds and health, indexes, leases,
        connections, rate limits. Raises ConfigError, and whatever a new part raises when it is started; then nothing
        has changed."""
        return self.generations.adopt(await self.generations.prepare(config))

    async def __aenter__(self) -> Proxy:
        async with AsyncExitStack() as starting:  # a part that cannot start ends those before it
            await starting.enter_async_context(LoopLag(self.metrics.group(ProcessMetrics).loop_lag, clock=self.clock))
            for part in (self.certificates, self._pool, self._probes, *self._written, self.generations):
                await starting.enter_async_context(part)
            if self.config.admin.enabled:
                await starting.enter_async_context(self._history)
            self._running = starting.pop_all()
        self._began = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not self._began:
                await self._begin()
            if scope.get("root_path"):
                scope = _without_root(scope)
            generation = self.generations.current
            generation.running += 1
            try:
                await generation.chain(scope, receive, send)
            finally:
                generation.running -= 1
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)

    async def _begin(self) -> None:
        """Start with the first request, under a server that sends no lifespan events. Nothing ends it then."""
        async with self._beginning:
            if not self._began:
                await self.__aenter__()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Start and end by the server's events. A start that fails is answered: a server that only sees an error out of
        here takes the app for one without a lifespan, and serves it unstarted."""
        await receive()
        try:
            await self.__aenter__()
        except Exception as error:
            log.exception("kvproxy cannot start")
            message = f"kvproxy cannot start: {type(error).__name__}: {error}"
            await send({"type": "lifespan.startup.failed", "message": message})
            return
        try:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        finally:
            await self.__aexit__()
        await send({"type": "lifespan.shutdown.complete"})


def read_config(source: ConfigLike, filters: Mapping[str, FilterType] | None = None) -> Config:
    """Return the configuration in a file or in plain data, in which `filters`, or those of other distributions, may
    stand. Raises ConfigError with every error."""
    if isinstance(source, Config):
        return source
    known = {name: kind.settings for name, kind in (discover() if filters is None else filters).items()}
    return load_config(source if isinstance(source, Mapping) else Path(source), extra_filters=known)


def _without_root(scope: Scope) -> Scope:
    """Return the scope as the proxy's own: apps mounted below a path are sent it as a part of the request's."""
    root: str = scope["root_path"]
    below = {**scope, "root_path": "", "path": scope["path"].removeprefix(root) or "/"}
    if scope.get("raw_path"):
        below["raw_path"] = scope["raw_path"].removeprefix(quote(root).encode()) or b"/"
    return below


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the handshake with a sentence if the server can send one; else it answers 403."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1003, "reason": NO_WEBSOCKET})
        return
    body = error_body(scope["path"], 501, reason="no_websocket", message=NO_WEBSOCKET)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": 501, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


def _make_pool(config: Config, *, clock: Clock, metrics: Metrics, certificates: CertificateWatch) -> UpstreamPool:
    pool = config.pool
    return UpstreamPool(
        max_connections=pool.max_connections,
        max_idle=pool.max_idle,
        idle_timeout_s=pool.idle_timeout,
        max_waiting=pool.max_waiting,
        max_head_bytes=pool.max_response_head,
        clock=clock,
        metrics=metrics,
        certificates=certificates,
    )


def _accompany(proxy: Proxy, config: Config, siblings: Siblings | None) -> Iterator[Companion]:
    for feature in installed(Feature):
        if (companion := feature.accompany(proxy, config, siblings=siblings)) is not None:
            yield companion


def _observe_requests(proxy: Proxy, config: Config) -> Iterator[WritingObserver[Any]]:
    for feature in installed(Feature):
        yield from feature.observe_requests(proxy, config)
