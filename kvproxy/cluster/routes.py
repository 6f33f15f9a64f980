"""All clusters together: which one a request goes to, and whether each can serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import TAKING, Condition
from kvproxy.cluster.feature import wakes_engines
from kvproxy.cluster.settings import RouteSettings

#: Cached answers. Paths and models come from clients, so the cache starts over when it is full. A dict, since a
#: BoundedMapping's hit takes six times as long.
_MAX_REMEMBERED = 4096

#: Longer paths are not cached, so that the cache is bounded in bytes too.
_MAX_KEY = 512


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """Where to, and what the engine calls the model ("": what the client calls it)."""

    cluster: Cluster
    upstream_model: str = ""
    route: RouteSettings | None = None  # None: no route leads there


@dataclass(frozen=True, slots=True)
class _Rule:
    prefix: str
    model: str
    target: RouteTarget

    def matches(self, path: str, model: str) -> bool:
        """Prefixes end where a path segment ends: `/v1` is no prefix of `/v10`."""
        prefix = self.prefix.rstrip("/")
        if path != prefix and not path.startswith(prefix + "/"):
            return False
        if self.model.endswith("*"):
            return model.startswith(self.model[:-1])
        return not self.model or self.model == model


class Routes:
    """The routes in order.

    The first match wins, with one refinement: when none of the matching routes names the model, one whose cluster has
    an endpoint that declares the model, or lists it as an adapter, goes before those whose cluster has not. Without any
    route in the configuration every cluster is such a match.
    """

    def __init__(self, rules: Sequence[_Rule]) -> None:
        self._rules = rules
        self._remembered: dict[tuple[str, str], tuple[RouteTarget, ...]] = {}

    @classmethod
    def from_settings(cls, routes: Sequence[RouteSettings], clusters: Mapping[str, Cluster]) -> Routes:
        """KeyError for a route to a cluster that is not in `clusters`."""
        routes = routes or tuple(RouteSettings(cluster=name) for name in clusters)
        return cls(
            [
                _Rule(route.prefix, route.model, RouteTarget(clusters[route.cluster], route.upstream_model, route))
                for route in routes
            ]
        )

    def resolve(self, path: str, model: str) -> RouteTarget | None:
        """Where a request for `path` and `model` ("" when unknown) goes; None when no route matches."""
        targets = self._remembered.get((path, model))
        if targets is None:
            targets = self._targets(path, model)
            if len(path) + len(model) <= _MAX_KEY:
                if len(self._remembered) >= _MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered[path, model] = targets
        if len(targets) > 1:
            for target in targets:
                if (target.upstream_model or model) in target.cluster.screening.named:
                    return target
        return targets[0] if targets else None

    def _targets(self, path: str, model: str) -> tuple[RouteTarget, ...]:
        """Return the routes that may still win; which of them does depends on the models declared at the moment."""
        matching = [rule for rule in self._rules if rule.matches(path, model)]
        if any(rule.model for rule in matching):
            matching = matching[:1]
        return tuple(rule.target for rule in matching)


def clusters_without_endpoint(clusters: Mapping[str, Cluster], now: float) -> list[str]:
    """Names of the clusters in which no endpoint takes traffic, and whose requests do not wait for one either."""
    return sorted(name for name, cluster in clusters.items() if not _available(cluster, now))


def _available(cluster: Cluster, now: float) -> bool:
    conditions = set[Condition]()
    for endpoint in cluster.endpoints:
        condition = endpoint.condition(now)
        if condition in TAKING:
            return True
        conditions.add(condition)
    if Condition.ASLEEP in conditions and wakes_engines(cluster.settings):
        return True
    return cluster.queue is not None and cluster.queue.awaits and conditions <= {Condition.NOT_READY}
