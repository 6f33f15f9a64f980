"""Metrics of certificates."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class CertificateMetrics(MetricGroup):
    """Certificates: those shown to clients and engines."""

    labels = {"place": "where a certificate is shown: `listen` or `endpoints`"}
    across = {"kvproxy_certificate_expires_seconds": Across.MIN}

    def __init__(self, r: CollectorRegistry) -> None:
        self.expires = CallbackGauge(
            "kvproxy_certificate_expires_seconds",
            "Seconds until the first certificate expires that is shown there; negative: it has expired",
            ["place"],
            registry=r,
        )
        self.reloads = Counter(
            "kvproxy_certificate_reloads", "Certificate files loaded again since they changed", ["result"], registry=r
        )
        for result in ("applied", "refused"):
            self.reloads.labels(result)
