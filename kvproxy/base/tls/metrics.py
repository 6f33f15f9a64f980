"""Metrics of certificates."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class CertificateMetrics(MetricGroup):
    """Certificates: those shown to clients and engines."""

    labels = {"place": "where a certificate is shown: `listen` or `endpoints`"}

    expires = callback_gauge(
        "kvproxy_certificate_expires_seconds",
        "Seconds until the first certificate expires that is shown there; negative: it has expired",
        "place",
        across=Across.MIN,
    )
    reloads = counter("kvproxy_certificate_reloads", "Certificate files loaded again since they changed", "result")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for result in ("applied", "refused"):
            self.reloads.labels(result)
