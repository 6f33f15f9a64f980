"""The one composition root: a configuration becomes a running proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from asyncio import get_running_loop
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.paths import dotted_path
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.types import Clock, EndpointId
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import Routes
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.operate.commands.live_advice import AdviceRunner
from kvproxy.operate.companion import Companion, Siblings
from kvproxy.operate.config.decode import decode_model
from kvproxy.operate.config.load import check_config, usable
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature
from kvproxy.operate.filter_plugins import discover
from kvproxy.operate.metrics.catalog import make_metrics
from kvproxy.operate.metrics.learned import show_learned
from kvproxy.operate.metrics.process import LoopLag, ProcessMetrics
from kvproxy.operate.mounted import may_be_below, without_root
from kvproxy.operate.receipts.recorder import make_recorder
from kvproxy.operate.receipts.writer import WritingObserver
from kvproxy.operate.runtime.generation import Generations, Shared
from kvproxy.operate.runtime.history import History
from kvproxy.operate.runtime.operated import ConfigReloader, OperatorFinding, Reloaded
from kvproxy.operate.runtime.recent import RecentDecisions
from kvproxy.operate.runtime.run import Run
from kvproxy.proxy.filters import kvcache
from kvproxy.proxy.filters.chain import FilterType, RequestGuard, WallClock
from kvproxy.proxy.forward.public import NO_WEBSOCKET
from kvproxy.proxy.request.body import HeldBodies
from kvproxy.proxy.request.error_reply import error_body
from kvproxy.proxy.request.exchange import Exchange

if TYPE_CHECKING:
    from kvproxy.operate.admin.app import AccessControl

#: Configuration in Python code: a loaded one, the path of a file, or the data of a file.
ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]
#: Name of the tenant that a host app authenticated, by the request's ASGI scope; "" for none.
TenantOf = Callable[[Scope], str]

log = logging.getLogger("kvproxy")

_LOOK_AGAIN_S = 0.02
#: Credentials of a host app's clients, which are none of the engines' business.
_OF_THE_HOST = frozenset({b"authorization", b"x-api-key", b"cookie"})
_TENANT_CHARS = 128


_utc_now = partial(datetime.now, UTC)


class Proxy:
    """The proxy as an ASGI app and an async context manager: inside it, probes and pools run.

    `config` is a path (`Proxy("config.yaml")`), plain data (`Proxy({"endpoints": {"a": "http://a:8000"}})`) or a loaded
    configuration; ConfigError names every error of it. Under another server the ASGI lifespan enters the proxy.
    `admin` is the operator's app, and `metrics_app` that of its metrics alone, to be mounted or for a listener of their
    own. `tenant` names who a host app authenticated; by default the name of `scope["user"]`. Engines then get none of
    that client's credentials. The filter `auth` replaces both.
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
        tenant: TenantOf | None = None,
    ) -> None:
        config = read_config(config, extra_filters)
        self._extra_filters = extra_filters
        self.tenant_of = tenant
        self.metrics = make_metrics() if metrics is None else metrics
        self.draining = False
        self.clock = clock
        self.wall_clock = wall_clock
        self.recent = RecentDecisions()
        self.findings: Sequence[OperatorFinding] = ()  # findings for the operator, shown on the live page
        self.public_url = ""  # URL for clients, set by the listener
        self.reloader: ConfigReloader | None = None  # reloads the file; None: there is no file
        self.adviser: AdviceRunner | None = None  # likewise
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
        self._run = Run(partial(_list_parts, self))

    @cached_property
    def admin(self) -> AccessControl:
        """The operator's app. (Made on first use: who embeds the proxy without it loads none of its code.)"""
        from kvproxy.operate.admin.app import build_admin_app

        return build_admin_app(self, self._history)

    @cached_property
    def metrics_app(self) -> ASGIApp:
        """Its metrics for Prometheus as an app, at every path and without access control."""
        from kvproxy.operate.admin.process import make_metrics_app

        return make_metrics_app(self.metrics)

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
    def kvcache(self) -> KvCache | None:
        """The service behind the `kvcache` filter."""
        return self.generations.current.kvcaches.get(kvcache.NAME)

    @property
    def guards(self) -> Sequence[RequestGuard]:
        """Checks of requests that other programs carry."""
        return self.generations.current.guards

    def status(self) -> dict[str, Any]:
        """Return what it does now: whether it runs, its open requests, and the load and health of its endpoints by
        cluster and id."""
        now = self.clock()
        clusters = {
            name: {str(one.id): one.status(now) for one in each.endpoints} for name, each in self.clusters.items()
        }
        return {"running": self._run.runs, "requests": self.generations.current.running, "clusters": clusters}

    def add_endpoint(self, name: str, url: str, *, cluster: str = "", **settings: Any) -> None:
        """Add an endpoint while it runs, or put it in the place of that of the same id. It stays over reloads.

        `settings` are further ones of an endpoint (`models`, `weight`, `api_key` ...). `cluster` may be left out where
        there is one. Raises ConfigError for wrong settings, LookupError for no such cluster."""
        endpoint = read_endpoint({"id": name, "url": url, **settings})
        if not _find_cluster(self.clusters, cluster).operator.add_endpoint(endpoint):
            raise ConfigError([Problem("id", "too many endpoints were added already", "remove some")])

    async def remove_endpoint(self, name: str, *, drain: float = 0.0, cluster: str = "") -> int:
        """Send an endpoint no further requests, and wait at most `drain` seconds for those it has; return how many are
        left. They still finish. Raises LookupError for no such endpoint."""
        owner = _find_cluster(self.clusters, cluster)
        leaving = owner.members.find_named(EndpointId(name))
        if not owner.operator.remove_endpoint(EndpointId(name)):
            raise LookupError(f"cluster {owner.name} has no endpoint {name!r}")
        give_up_at = self.clock() + drain
        while left := sum(one.load.own_in_flight for one in leaving):
            if self.clock() >= give_up_at:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        return left

    async def reload(self, config: ConfigLike) -> Reloaded:
        """Serve by this configuration from now on; running requests finish by the one before.

        Unchanged parts stay as they are: endpoints with their loads, learned speeds and health, indexes, leases,
        connections, rate limits. Raises ConfigError, and whatever a new part raises when it is started; then nothing
        has changed."""
        return self.generations.adopt(await self.generations.prepare(read_config(config, self._extra_filters)))

    async def __aenter__(self) -> Self:
        await self._run.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run.end()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if self._run.loop is None or self._run.loop is not get_running_loop():
                await self._run.begin()
            if may_be_below(scope):
                scope = without_root(scope)
            if "user" in scope or self.tenant_of is not None:
                scope = _with_tenant(self, scope)
            generation = self.generations.current
            generation.running += 1
            try:
                await generation.chain(scope, receive, send)
            finally:
                generation.running -= 1
        elif scope["type"] == "lifespan":
            await self._run.serve_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)


def read_config(source: ConfigLike, filters: Mapping[str, FilterType] | None = None) -> Config:
    """Return the configuration in a file or in plain data, in which `filters`, or those of other distributions, may
    stand. Raises ConfigError with every error, and logs the warnings, which `kvproxy check` would print."""
    if isinstance(source, Config):
        return source
    known = {name: kind.settings for name, kind in (discover() if filters is None else filters).items()}
    checked = check_config(source if isinstance(source, Mapping) else Path(source), extra_filters=known)
    config = usable(checked)
    for problem in checked[1]:
        if problem.severity == "warning":
            log.warning("%s", problem.located())
    return config


def read_endpoint(raw: Mapping[str, Any]) -> EndpointSettings:
    """Return the settings of one endpoint. Raises ConfigError with every error."""
    decoded = decode_model(EndpointSettings, raw, dotted_path)
    problems = list(decoded.problems)
    if decoded.value is not None and (fault := url_fault(decoded.value.url)):
        problems.append(Problem("url", fault, "http://host:port"))
    if problems or decoded.value is None:
        raise ConfigError(problems)
    return decoded.value


def _with_tenant(proxy: Proxy, scope: Scope) -> Scope:
    """Return the scope as the tenant's whom the host app authenticated, if there is one."""
    name = (proxy.tenant_of or name_user)(scope)[:_TENANT_CHARS]
    if not name or any(spec.name == "auth" for spec in proxy.config.filters):
        return scope
    scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in _OF_THE_HOST]}
    Exchange.of(scope, now=proxy.clock()).tenant = name
    return scope


def _find_cluster(clusters: Mapping[str, Cluster], name: str) -> Cluster:
    if not name and len(clusters) == 1:
        return next(iter(clusters.values()))
    if name not in clusters:
        raise LookupError(f"no cluster {name!r}; there are: {', '.join(clusters)}")
    return clusters[name]


def _list_parts(proxy: Proxy) -> Iterator[AbstractAsyncContextManager[Any]]:
    """Yield the parts of a proxy that starts, in their order."""
    yield LoopLag(proxy.metrics.group(ProcessMetrics).loop_lag, clock=proxy.clock)
    yield from (proxy.certificates, proxy._pool, proxy._probes, *proxy._written, proxy.generations)
    if proxy.config.admin.enabled:
        yield proxy._history


def name_user(scope: Scope) -> str:
    """Return the name of the user whom a host's middleware put into the scope, as Starlette's AuthenticationMiddleware
    does; "" for a user that is not authenticated."""
    user = scope["user"]
    if isinstance(user, str):
        return user
    if not getattr(user, "is_authenticated", user is not None):
        return ""
    return str(getattr(user, "display_name", None) or getattr(user, "username", None) or "")


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
        idle_timeout_s=pool.idle_timeout,
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
