"""Metrics of requests and of bounds on clients."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy.base.metrics.across_workers import Across
from kvproxy.base.metrics.collectors import CallbackGauge, Counter
from kvproxy.base.metrics.groups import MetricGroup
from kvproxy.base.metrics.present import HitWindows


class RequestMetrics(MetricGroup):
    """The request path."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.ends = Counter("kvproxy_request_ends", "How forwarded requests ended", ["end"], registry=r)
        self.results = Counter(
            "kvproxy_request_results",
            "Finished requests by result; failed: 5xx, or broken off",
            ["cluster", "result"],
            registry=r,
        )  # ok, failed, client_error, client_left
        self.clients = Counter(
            "kvproxy_client_requests",
            "Inference requests by kind of client, and whether they name a session",
            ["client", "session"],
            registry=r,
        )  # one of request.session.CLIENTS, or unknown; named, child (a sub-agent's or a fork), none
        self.local_replies = Counter(
            "kvproxy_local_replies", "Answers made by the proxy", ["status", "reason"], registry=r
        )
        self.retries = Counter("kvproxy_retries", "Attempts after the first", ["reason"], registry=r)
        self.retries_refused = Counter("kvproxy_retries_refused", "Retries not made", ["reason"], registry=r)
        self.pick_reservations = Counter(
            "kvproxy_pick_reservations",
            "Places reserved for requests forwarded by others (`POST /pick`), and their ends",
            ["result"],
            registry=r,
        )  # made, expired, and the outcomes of AttemptOutcome
        self.cached_counts = Counter(
            "kvproxy_cached_counts_written",
            "Counts of cached tokens added to answers whose usage had none, by source",
            ["source"],
            registry=r,
        )  # engine, predicted
        self.prompt_tokens = Counter(
            "kvproxy_prompt_tokens", "Prompt tokens by the engines' count", ["cluster"], registry=r
        )
        self.media_tokens = Counter(
            "kvproxy_media_tokens",
            "Prompt tokens of pictures, audio and video, where engines report them apart",
            ["cluster"],
            registry=r,
        )
        self.cached_tokens = Counter(
            "kvproxy_cached_tokens", "Prompt tokens the engines served from cache", ["cluster"], registry=r
        )
        self.completion_tokens = Counter("kvproxy_completion_tokens", "Tokens generated", ["cluster"], registry=r)


class CacheUseMetrics(MetricGroup):
    """Use of the engines' caches."""

    across = {
        "kvproxy_cache_hit_ratio": Across.MEAN,
        "kvproxy_cache_miss_ratio": Across.MEAN,
    }

    def __init__(self, r: CollectorRegistry) -> None:
        self.hit_ratio = CallbackGauge(
            "kvproxy_cache_hit_ratio",
            "Share served from cache, over the last 1000 requests by the engines' count",
            ["cluster", "by"],
            registry=r,
        )
        self.miss_ratio = CallbackGauge(
            "kvproxy_cache_miss_ratio", "1 minus the hit ratio", ["cluster", "by"], registry=r
        )
        self.hit_window_requests = CallbackGauge(
            "kvproxy_cache_window_requests", "Requests these ratios cover", ["cluster"], registry=r
        )
        self.tier_hits = Counter(
            "kvproxy_tier_hits",
            "Requests placed where a tier was estimated to hold some of the prompt",
            ["cluster", "tier"],
            registry=r,
        )
        self.tier_hit_tokens = Counter(
            "kvproxy_tier_hit_tokens", "Prompt tokens it was estimated to hold", ["cluster", "tier"], registry=r
        )
        self.saved_tokens = Counter(
            "kvproxy_saved_prompt_tokens",
            "Prompt tokens not computed because they were cached",
            ["model", "tenant"],
            registry=r,
        )
        self.saved_seconds = Counter(
            "kvproxy_saved_prefill_seconds",
            "Engine seconds of prefill these would have taken, by learned speeds "
            "(of clusters with a policy that learns them)",
            ["model", "tenant"],
            registry=r,
        )
        self.hit_windows = HitWindows()
        self.hit_ratio.set_source(self.hit_windows.hit_ratios)
        self.miss_ratio.set_source(self.hit_windows.miss_ratios)
        self.hit_window_requests.set_source(self.hit_windows.sizes)


class ClientBoundMetrics(MetricGroup):
    """Bounds on clients."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.body_refused = Counter("kvproxy_bodies_refused", "Bodies over the limit", registry=r)
        self.connections_refused = Counter(
            "kvproxy_connections_refused", "Client connections beyond the bound", registry=r
        )
        self.bodies_full = Counter("kvproxy_bodies_full", "Bodies refused because too many bytes were held", registry=r)
        self.bodies_held = Gauge("kvproxy_bodies_held_bytes", "Request bodies held", registry=r)
        self.bodies_limit = Gauge("kvproxy_bodies_limit_bytes", "Bound of these", registry=r)
