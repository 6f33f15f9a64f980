"""Metrics of requests and of bounds on clients."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.base.metrics.groups import MetricGroup, Metrics, callback_gauge, counter, gauge
from kvproxy.base.metrics.present import HitWindows
from kvproxy.base.types import InferenceRequest


class RequestMetrics(MetricGroup):
    """The request path."""

    ends = counter("kvproxy_request_ends", "How forwarded requests ended", "end")
    #: ok, failed, client_error, client_left
    results = counter(
        "kvproxy_request_results", "Finished requests by result; failed: 5xx, or broken off", "cluster result"
    )
    #: one of request.session.CLIENTS, or unknown; named, child (a sub-agent's or a fork), none
    clients = counter(
        "kvproxy_client_requests",
        "Inference requests by kind of client, and whether they name a session",
        "client session",
    )
    local_replies = counter("kvproxy_local_replies", "Answers made by the proxy", "status reason")
    retries = counter("kvproxy_retries", "Attempts after the first", "reason")
    retries_refused = counter("kvproxy_retries_refused", "Retries not made", "reason")
    #: made, expired, and the outcomes of AttemptOutcome
    pick_reservations = counter(
        "kvproxy_pick_reservations",
        "Places reserved for requests forwarded by others (`POST /pick`), and their ends",
        "result",
    )
    prompt_tokens = counter("kvproxy_prompt_tokens", "Prompt tokens by the engines' count", "cluster")
    media_tokens = counter(
        "kvproxy_media_tokens", "Prompt tokens of pictures, audio and video, where engines report them apart", "cluster"
    )
    cached_tokens = counter("kvproxy_cached_tokens", "Prompt tokens the engines served from cache", "cluster")
    completion_tokens = counter("kvproxy_completion_tokens", "Tokens generated", "cluster")


class CacheUseMetrics(MetricGroup):
    """Use of the engines' caches."""

    hit_ratio = callback_gauge(
        "kvproxy_cache_hit_ratio",
        "Share served from cache, over the last 1000 requests by the engines' count",
        "cluster by",
        across=Across.MEAN,
    )
    miss_ratio = callback_gauge("kvproxy_cache_miss_ratio", "1 minus the hit ratio", "cluster by", across=Across.MEAN)
    hit_window_requests = callback_gauge("kvproxy_cache_window_requests", "Requests these ratios cover", "cluster")
    tier_hits = counter(
        "kvproxy_tier_hits", "Requests placed where a tier was estimated to hold some of the prompt", "cluster tier"
    )
    tier_hit_tokens = counter("kvproxy_tier_hit_tokens", "Prompt tokens it was estimated to hold", "cluster tier")
    saved_tokens = counter(
        "kvproxy_saved_prompt_tokens", "Prompt tokens not computed because they were cached", "model tenant"
    )
    saved_seconds = counter(
        "kvproxy_saved_prefill_seconds",
        "Engine seconds of prefill these would have taken, by learned speeds "
        "(of clusters with a policy that learns them)",
        "model tenant",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.hit_windows = HitWindows()
        self.hit_ratio.set_source(self.hit_windows.hit_ratios)
        self.miss_ratio.set_source(self.hit_windows.miss_ratios)
        self.hit_window_requests.set_source(self.hit_windows.sizes)


class ClientBoundMetrics(MetricGroup):
    """Bounds on clients."""

    body_refused = counter("kvproxy_bodies_refused", "Bodies over the limit")
    connections_refused = counter("kvproxy_connections_refused", "Client connections beyond the bound")
    bodies_full = counter("kvproxy_bodies_full", "Bodies refused because too many bytes were held")
    bodies_held = gauge("kvproxy_bodies_held_bytes", "Request bodies held")
    bodies_limit = gauge("kvproxy_bodies_limit_bytes", "Bound of these")


class ClientCounts:
    """Counts of inference requests by kind of client, without looking labels up for every request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counted: dict[tuple[str, str], CounterCell] = {}

    def count_request(self, inference: InferenceRequest) -> None:
        """Count a request."""
        session = "child" if inference.parent_session else "named" if inference.session_key else "none"
        about = (inference.client, session)
        counter = self._counted.get(about)
        if counter is None:
            clients = self._metrics.group(RequestMetrics).clients
            counter = self._counted[about] = clients.labels(inference.client or "unknown", session)
        counter.value += 1.0
