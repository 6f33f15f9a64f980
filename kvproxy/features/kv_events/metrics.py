"""Metrics of the streams."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, counter, gauge


class KvEventMetrics(MetricGroup):
    """KV events: one stream per endpoint and data-parallel rank."""

    #: applied, replayed, duplicate, malformed
    batches = counter("kvproxy_kv_event_batches", "Batches by outcome", "endpoint outcome")
    blocks = counter("kvproxy_kv_event_blocks", "Blocks in events", "endpoint kind")
    #: unknown_type, malformed
    skipped = counter("kvproxy_kv_events_skipped", "Events that could not be used", "endpoint reason")
    gaps = counter("kvproxy_kv_event_gaps", "Breaks in the numbering", "endpoint outcome")  # filled, lost, restart
    behind = counter(
        "kvproxy_kv_event_behind", "Times a stream brought batches faster than they were applied", "endpoint"
    )
    lag = gauge("kvproxy_kv_event_lag_seconds", "Published to applied, last batch", "endpoint rank", across=Across.MAX)
    #: connecting, exact, degraded, approximate
    state = gauge(
        "kvproxy_kv_event_stream_state", "1: the stream is in this state", "endpoint rank state", across=Across.MAX
    )
