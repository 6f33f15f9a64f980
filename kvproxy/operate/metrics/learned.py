"""Gauges of the speeds that clusters' policies learned of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.feature import ClusterFeature
from kvproxy.cluster.metrics import SpeedMetrics


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

    def onboarding() -> Iterable[tuple[tuple[str, ...], float]]:
        for cluster in clusters():
            if cluster.speeds is not None:
                known = cluster.speeds.onboarding.known(cluster.speeds.seconds[1])
                for endpoint, prices in known.items():
                    slowness = cluster.speeds.slowness(endpoint, clock())
                    for tier, price_s in prices.items():
                        yield (cluster.name, str(endpoint), tier.value), slowness * price_s

    learned = metrics.group(SpeedMetrics)
    learned.learned_tokens_per_s.set_source(speeds)
    learned.learned_slowness.set_source(slowness)
    learned.learned_onboarding.set_source(onboarding)
    for feature in installed(ClusterFeature):
        feature.show_clusters(metrics, clusters, clock=clock)
