"""Metrics of resumed streams."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter, histogram

_GAP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ResumeMetrics(MetricGroup):
    """Streams that broke on routes with `resume`."""

    labels = {
        "grade": "how a stream went on: exact, text, restart (nothing had reached the client)",
    }

    resumed = counter(
        "kvproxy_streams_resumed", "Broken streams whose rest was requested from another engine", "cluster grade"
    )
    moved = counter("kvproxy_streams_moved", "Streams that `kvproxy drain --move` had go on elsewhere", "cluster")
    #: guided, tools, overlap, budget, ...
    refused = counter("kvproxy_streams_not_resumed", "Broken streams that ended with an error event", "cluster reason")
    gap = histogram(
        "kvproxy_stream_resume_gap_seconds",
        "Time without a token in a resumed stream, from the break to the first new one",
        "cluster",
        buckets=_GAP_BUCKETS_S,
    )
