"""The catalogue: the groups of all rooms and installed features, each metric declared once, by the code that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproxy.base.installed import BaseFeature, installed
from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.exposition import Registry
from kvproxy.base.metrics.groups import MetricGroup, Metrics
from kvproxy.base.tls.metrics import CertificateMetrics
from kvproxy.base.upstream.metrics import ConnectionMetrics
from kvproxy.cache.metrics import HoldingMetrics, IndexMetrics, KvCacheMetrics, TierMetrics
from kvproxy.cluster.metrics import (
    EndpointRequestMetrics,
    EndpointStateMetrics,
    RoutingMetrics,
    SpeedMetrics,
)
from kvproxy.operate.metrics.process import ProcessMetrics, ReceiptMetrics
from kvproxy.proxy.metrics import CacheUseMetrics, ClientBoundMetrics, RequestMetrics

#: Groups of the core, in the order of docs/metrics.md.
CORE: Sequence[type[MetricGroup]] = (
    RequestMetrics,
    RoutingMetrics,
    EndpointRequestMetrics,
    CacheUseMetrics,
    SpeedMetrics,
    EndpointStateMetrics,
    ConnectionMetrics,
    CertificateMetrics,
    KvCacheMetrics,
    IndexMetrics,
    HoldingMetrics,
    TierMetrics,
    BoundMetrics,
    ClientBoundMetrics,
    ReceiptMetrics,
    ProcessMetrics,
)


#: Gauges of prometheus_client's ProcessCollector.
_OF_THE_COLLECTOR = {"process_max_fds": Across.MAX, "process_start_time_seconds": Across.MIN}


def list_groups() -> Sequence[type[MetricGroup]]:
    """Those of the core and of every installed feature."""
    return (*CORE, *(group for feature in installed(BaseFeature) for group in feature.list_metrics()))


def make_metrics(registry: Registry | None = None) -> Metrics:
    """Every group from the start: a series of something that is off reads 0, and is not absent."""
    metrics = Metrics(registry)
    for group in list_groups():
        metrics.group(group)
    return metrics


def merge_rules() -> Mapping[str, Across]:
    """How gauges of several workers become one, by name; the rest are summed."""
    declared = (one for group in list_groups() for _, one in group.list_declared())
    return {**_OF_THE_COLLECTOR, **{one.name: one.across for one in declared if one.across is not Across.SUM}}
