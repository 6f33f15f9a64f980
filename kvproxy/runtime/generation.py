"""What one configuration is built into: clusters, services and the chain."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.prober import HttpProbe
from kvproxy.cluster.routes import Routes
from kvproxy.config.cluster_schema import ClusterSettings
from kvproxy.config.filter_schema import DEFAULT_FILTERS
from kvproxy.config.schema import Config, FilterSpec
from kvproxy.filters.chain import FilterContext, FilterType, Services, WallClock, build_chain
from kvproxy.filters.registry import FILTERS, discover
from kvproxy.kvcache.service import KvCache
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.body import HeldBodies
from kvproxy.request.error_reply import local_reply
from kvproxy.request.observer import RequestObserver
from kvproxy.routing.registry import configured, runtime_overrides
from kvproxy.runtime.state import StateStore
from kvproxy.types import Clock
from kvproxy.upstream.pool import UpstreamPool


@dataclass(frozen=True, slots=True)
class Shared:
    """What outlives every generation."""

    metrics: Metrics
    clock: Clock
    wall_clock: WallClock
    rng: random.Random
    pool: UpstreamPool
    probes: UpstreamPool
    extra_filters: Mapping[str, FilterType] | None
    observers: tuple[RequestObserver, ...]
    bodies: HeldBodies


class Generation:
    """What one configuration makes of the states there are, whole or not at all (ConfigError).

    Making it has no effect. It serves once its `states` are kept, its `parts` entered and `serve` was called. `running`
    counts its open requests, those in its `chain`.
    """

    def __init__(self, config: Config, shared: Shared, store: StateStore) -> None:
        self.config = config
        self._shared = shared
        self.running = 0
        self.states = store.draft()
        self.clusters: dict[str, Cluster] = {
            name: self.states.get(Cluster, name, partial(self._cluster, name, settings), close=Cluster.close)
            for name, settings in config.clusters.items()
        }
        routes = self.routes = Routes.from_config(config, self.clusters)
        context = FilterContext(
            config,
            shared.metrics,
            shared.clock,
            shared.wall_clock,
            shared.rng,
            Services(self.clusters, routes, shared.pool, shared.bodies),
            self.states,
            observers=list(shared.observers),
        )
        specs = config.filters or tuple(FilterSpec(name=name) for name in DEFAULT_FILTERS)
        extra = shared.extra_filters
        types = {**(discover({spec.name for spec in specs}) if extra is None else extra), **FILTERS}
        self.chain: ASGIApp = build_chain(specs, self._not_found, context=context, types=types)
        self.kvcaches: list[KvCache] = context.kvcaches
        self._on_serving = context.on_serving
        #: In the order they are entered; some may be running already, in the generation before.
        self.parts: list[AbstractAsyncContextManager[object]] = [*self.clusters.values(), *context.lifetimes]

    def serve(self) -> dict[str, dict[str, object]]:
        """From now on this is the configuration: clusters get its settings, and gauges read what it uses. Answers with
        the routing parameters that are lost by it, by cluster: those an operator changed about a policy that another
        one replaces."""
        lost: dict[str, dict[str, object]] = {}
        for name, cluster in self.clusters.items():
            settings, policy = self.config.clusters[name], cluster.policy
            changed = runtime_overrides(policy, configured(cluster.settings, cluster.settings.policy))
            if settings != cluster.settings:
                cluster.reconfigure(settings, probe=self._probe(settings))
            cluster.show()
            if changed and cluster.policy is not policy:
                lost[name] = changed
        for show in self._on_serving:
            show()
        return lost

    def _cluster(self, name: str, settings: ClusterSettings) -> Cluster:
        shared = self._shared
        return Cluster(
            name,
            settings,
            metrics=shared.metrics,
            clock=shared.clock,
            rng=shared.rng,
            probe=self._probe(settings),
        )

    def _probe(self, settings: ClusterSettings) -> HttpProbe:
        return HttpProbe(self._shared.probes, settings.health)

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What a chain without a router answers."""
        message = "No filter answered this request."
        metrics = self._shared.metrics
        await local_reply(scope, send, status=404, reason="no_filter", message=message, metrics=metrics)


def needs_restart(old: Config, new: Config) -> list[str]:
    """Settings whose change takes effect only at the next start of the process, by path."""
    names = ("listen", "admin", "picker", "limits", "pool", "shutdown", "log", "receipts")
    return [name for name in names if getattr(old, name) != getattr(new, name)]
