"""Metrics of stored responses."""

from __future__ import annotations

from kvproxy.base.metrics.groups import MetricGroup, counter


class StoredResponsesMetrics(MetricGroup):
    """Answers kept, and looked up."""

    #: stored, too_large, unreadable, failed
    answers = counter("kvproxy_stored_responses", "Answers of `/v1/responses` by what became of them", "result")
    #: found, missing, failed
    lookups = counter("kvproxy_stored_response_lookups", "Earlier answers that requests name", "result")
