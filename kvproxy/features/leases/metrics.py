"""Metrics of leases."""

from __future__ import annotations

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.groups import MetricGroup, callback_gauge, counter


class LeaseMetrics(MetricGroup):
    """Prompts kept for conversations that are expected back."""

    labels = {
        "why": "why a prompt is kept: `tool_call` (its answer calls a tool) or `client` (requested it)",
    }

    grants = counter("kvproxy_lease_grants", "Prompts that are to be kept, by why", "why")  # tool_call, client
    #: short, max_leases, tenant_budget, endpoint_budget, no_pins, duplicate
    refusals = counter("kvproxy_lease_refusals", "Prompts worth keeping that are not kept", "reason")
    #: kept, broken, elsewhere, unverified, early; without a return: expired, session_ended, no_effect
    results = counter("kvproxy_lease_results", "Leases by how they ended", "result")
    promised_tokens = counter(
        "kvproxy_lease_promised_tokens", "Tokens under leases whose conversation came back and that were verified"
    )
    reused_tokens = counter("kvproxy_lease_reused_tokens", "Of these, tokens that the engines did reuse")
    reused_seconds = counter(
        "kvproxy_lease_reused_seconds",
        "Seconds of prefill these would have taken, by learned speeds (some of it "
        "would have been cached without a lease)",
    )
    kept_ratio = callback_gauge(
        "kvproxy_lease_kept_ratio",
        "Of the promises that could be verified, the share that was kept",
        across=Across.MEAN,
    )
    held_tokens = callback_gauge(
        "kvproxy_lease_held_tokens", "Tokens under lease by tenant", "tenant", across=Across.MAX
    )
    entries = callback_gauge(
        "kvproxy_lease_entries", "`leases`, and conversations that are `waiting`", "what", across=Across.MAX
    )
