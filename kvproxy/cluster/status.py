"""What all clusters say together: whether each can serve, and what their policies learned of engines, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock

TAKING = (Condition.UP, Condition.SATURATED)


def clusters_without_endpoint(clusters: Mapping[str, Cluster], now: float) -> list[str]:
    """Names of the clusters in which no endpoint takes traffic."""
    return sorted(name for name, cluster in clusters.items() if not _available(cluster, now))


def _available(cluster: Cluster, now: float) -> bool:
    return any(endpoint.condition(now) in TAKING for endpoint in cluster.endpoints)


def show_learned(metrics: Metrics, clusters: Callable[[], Iterable[Cluster]], *, clock: Clock) -> None:
    """Read at every scrape, from the clusters there are then; clusters whose policy learns nothing, or
    has learned nothing yet, have no series."""

    def speeds() -> Iterable[tuple[tuple[str, ...], float]]:
        for cluster in clusters():
            if cluster.speeds is not None and not cluster.speeds.learning:
                yield (cluster.name,), cluster.speeds.estimates(clock()).tokens_per_s

    def slowness() -> Iterable[tuple[tuple[str, ...], float]]:
        for cluster in clusters():
            if cluster.speeds is not None and not cluster.speeds.learning:
                for endpoint in cluster.endpoints:
                    yield (cluster.name, str(endpoint.id)), cluster.speeds.slowness(endpoint.id, clock())

    metrics.cache.learned_tokens_per_s.set_source(speeds)
    metrics.cache.learned_slowness.set_source(slowness)
