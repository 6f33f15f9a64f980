"""Metrics of engines that sleep."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class SleepMetrics(MetricGroup):
    """Engines woken and put to sleep."""

    #: done, failed
    wakes = counter("kvproxy_engine_wakes", "Calls that wake an engine, by how they ended", "cluster result")
    sleeps = counter("kvproxy_engine_sleeps", "Calls that put an engine to sleep, by how they ended", "cluster result")
    held = callback_gauge("kvproxy_requests_held_for_wake", "Requests held until an engine is awake", across=Across.SUM)
