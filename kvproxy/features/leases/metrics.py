"""Metrics of leases."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup


class LeaseMetrics(MetricGroup):
    """Prompts kept for conversations that are expected back."""

    across = {
        "kvproxy_lease_kept_ratio": Across.MEAN,
        "kvproxy_lease_held_tokens": Across.MAX,
        "kvproxy_lease_entries": Across.MAX,
    }
    labels = {
        "why": "why a prompt is kept: `tool_call` (its answer calls a tool) or `client` (requested it)",
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.grants = Counter(
            "kvproxy_lease_grants",
            "Prompts that are to be kept, by why",
            ["why"],
            registry=r,
        )  # tool_call, client
        self.refusals = Counter(
            "kvproxy_lease_refusals", "Prompts worth keeping that are not kept", ["reason"], registry=r
        )  # short, max_leases, tenant_budget, endpoint_budget, no_pins, duplicate
        self.results = Counter("kvproxy_lease_results", "Leases by how they ended", ["result"], registry=r)
        # kept, broken, elsewhere, unverified, early; without a return: expired, session_ended, no_effect
        self.promised_tokens = Counter(
            "kvproxy_lease_promised_tokens",
            "Tokens under leases whose conversation came back and that were verified",
            registry=r,
        )
        self.reused_tokens = Counter(
            "kvproxy_lease_reused_tokens", "Of these, tokens that the engines did reuse", registry=r
        )
        self.reused_seconds = Counter(
            "kvproxy_lease_reused_seconds",
            "Seconds of prefill these would have taken, by learned speeds (some of it "
            "would have been cached without a lease)",
            registry=r,
        )
        self.kept_ratio = CallbackGauge(
            "kvproxy_lease_kept_ratio", "Of the promises that could be verified, the share that was kept", registry=r
        )
        self.held_tokens = CallbackGauge(
            "kvproxy_lease_held_tokens", "Tokens under lease by tenant", ["tenant"], registry=r
        )
        self.entries = CallbackGauge(
            "kvproxy_lease_entries",
            "`leases`, and conversations that are `waiting`",
            ["what"],
            registry=r,
        )
