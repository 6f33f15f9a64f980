"""Metrics of picker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.collectors import Counter, Histogram
from kvproxy.base.metrics.groups import MetricGroup

LOCAL_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)


class PickerMetrics(MetricGroup):
    """Requests that Envoy carries (`kvproxy picker`)."""

    labels = {
        "place": "`picker`",
        "queue": "Envoy's reservations (`picker`), `picker_streams` and `picker_connections`",
        "mode": "how Envoy sends the request's body: `buffered`, `duplex`, or `headers` where it does not or does not "
        "wait",
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvproxy_picker_requests",
            "Requests from Envoy, by its mode of sending bodies",
            ["mode", "result"],
            registry=r,
        )  # buffered, duplex, headers; picked, refused, malformed, body_timeout, error
        self.served = Counter(
            "kvproxy_picker_served", "Answers by where they came from, against the pick", ["result"], registry=r
        )  # as_picked, fallback, elsewhere, unknown (no endpoint of ours), unreported, none (Envoy's own answer)
        self.closed = Counter(
            "kvproxy_picker_connections_closed",
            "Connections that the picker closed of its own accord",
            ["reason"],
            registry=r,
        )  # preface, idle, replaced (for a new one, being the longest idle), refused (all are busy)
        self.seconds = Histogram(
            "kvproxy_picker_decision_seconds",
            "Whole body there to the endpoint named",
            buckets=LOCAL_BUCKETS_S,
            registry=r,
        )
