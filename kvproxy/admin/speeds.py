"""What an operator should know of the speeds that policies learn: that they do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvproxy.admin.operated import Finding
from kvproxy.cluster.cluster import Cluster

#: So many placements without one sample are no accident.
NOTABLE_REQUESTS = 500

_FIX = (
    "stream answers, or let the kvcache filter read the engines' own counters: engine_metrics_interval above 0, "
    "SGLang with --enable-metrics and without other clients"
)


def unlearned(clusters: Mapping[str, Cluster]) -> Iterable[Finding]:
    """A finding for every cluster that decides by speeds and has seen none for long."""
    for name, cluster in clusters.items():
        speeds = cluster.speeds
        if speeds is None or speeds.requests_without_sample < NOTABLE_REQUESTS:
            continue
        believed = (
            "speeds are the defaults, alike for all" if speeds.learning else "what was learned of slow ones fades"
        )
        what = f"no sample of the engines' speeds in {speeds.requests_without_sample:,} requests: {believed}"
        yield Finding("warning", f"clusters.{name}", what, _FIX)
