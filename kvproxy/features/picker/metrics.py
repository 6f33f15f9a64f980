"""Metrics of picker."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter, histogram

LOCAL_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)


class PickerMetrics(MetricGroup):
    """Requests that Envoy carries (`kvproxy picker`)."""

    labels = {
        "place": "`picker`",
        "queue": "Envoy's reservations (`picker`), `picker_streams` and `picker_connections`",
        "mode": "how Envoy sends the request's body: `buffered`, `duplex`, or `headers` where it does not or does not "
        "wait",
    }

    #: buffered, duplex, headers; picked, refused, malformed, body_timeout, error
    requests = counter("kvproxy_picker_requests", "Requests from Envoy, by its mode of sending bodies", "mode result")
    #: as_picked, fallback, elsewhere, unknown (no endpoint of ours), unreported, none (Envoy's own answer)
    served = counter("kvproxy_picker_served", "Answers by where they came from, against the pick", "result")
    #: preface, idle, replaced (for a new one, being the longest idle), refused (all are busy)
    closed = counter(
        "kvproxy_picker_connections_closed", "Connections that the picker closed of its own accord", "reason"
    )
    seconds = histogram(
        "kvproxy_picker_decision_seconds", "Whole body there to the endpoint named", buckets=LOCAL_BUCKETS_S
    )
