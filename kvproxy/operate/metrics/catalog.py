"""Every metric kvproxy exposes, declared once.

Labels come from closed or bounded sets; children are kept, not looked up. A component takes the `Metrics` object, or
the group or the one metric it needs. A group's docstring is its heading in docs/metrics.md.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy import __version__
from kvproxy.base.metrics.collectors import CallbackGauge, Counter, Histogram
from kvproxy.base.metrics.exposition import Registry
from kvproxy.base.metrics.present import HitWindows
from kvproxy.cache.metrics import (
    LOCAL_BUCKETS_S,
    HoldingMetrics,
    KvCacheMetrics,
    KvEventMetrics,
    LeaseMetrics,
    SnapshotMetrics,
    TierMetrics,
    TransferMetrics,
)

#: As far as `timeouts.first_byte` goes.
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COST_BUCKETS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0, 100_000.0)  # seconds, blocks, scores
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class RequestMetrics:
    """The request path."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.finished = Counter("kvproxy_requests", "Requests finished", ["cluster", "endpoint", "status"], registry=r)
        self.ends = Counter("kvproxy_request_ends", "How forwarded requests ended", ["end"], registry=r)
        self.results = Counter(
            "kvproxy_request_results", "Requests over by what became of them; failed: 5xx, or broken off",
            ["cluster", "result"], registry=r,
        )  # fmt: skip  # ok, failed, client_error, client_left
        self.clients = Counter(
            "kvproxy_client_requests", "Inference requests by kind of client, and whether they name a session",
            ["client", "session"], registry=r,
        )  # fmt: skip  # one of request.session.CLIENTS, or unknown; named, child (a sub-agent's or a fork), none
        self.picks = Counter("kvproxy_picks", "Routing decisions", ["cluster", "policy", "reason"], registry=r)
        self.shadow_decisions = Counter(
            "kvproxy_shadow_decisions", "Decisions of a shadow policy against the live one",
            ["cluster", "policy", "result"], registry=r,
        )  # fmt: skip  # same, different, error, skipped (too many a second)
        self.shadow_cost_difference = Histogram(
            "kvproxy_shadow_cost_difference",
            "Where they differ: what the other's endpoint would cost more by the costs of `by`, in that policy's unit",
            ["cluster", "policy", "by"], buckets=COST_BUCKETS, registry=r,
        )  # fmt: skip
        self.pick_reservations = Counter(
            "kvproxy_pick_reservations", "Places reserved for requests others carry (`POST /pick`), and their ends",
            ["result"], registry=r,
        )  # fmt: skip  # made, expired, and the outcomes of AttemptOutcome
        self.retries = Counter("kvproxy_retries", "Attempts after the first", ["reason"], registry=r)
        self.retries_refused = Counter("kvproxy_retries_refused", "Retries not made", ["reason"], registry=r)
        self.attempt_failures = Counter(
            "kvproxy_attempt_failures", "Failed attempts on endpoints", ["cluster", "endpoint", "reason"], registry=r
        )
        self.cached_counts = Counter(
            "kvproxy_cached_counts_written", "Counts of cached tokens put into answers whose usage had none, by whose "
            "they are", ["source"], registry=r,
        )  # fmt: skip  # engine, predicted
        self.local_replies = Counter(
            "kvproxy_local_replies", "Answers made by the proxy", ["status", "reason"], registry=r
        )
        self.preferences = Counter(
            "kvproxy_preferences", "What became of a preferred endpoint", ["result"], registry=r
        )  # followed, unknown, unhealthy, draining, asleep, saturated, excluded, breaker_open
        self.router_queue_wait = Histogram(
            "kvproxy_router_queue_wait_seconds", "Time held in the router queue, by requests that were", ["cluster"],
            buckets=TTFT_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.router_queue_exits = Counter(
            "kvproxy_router_queue_exits", "Requests that left the router queue, or found it full",
            ["cluster", "reason"], registry=r,
        )  # fmt: skip  # turn, max_wait, no_endpoint, queue_off, client_left, refused
        self.router_queue_oldest = Gauge(
            "kvproxy_router_queue_oldest_wait_seconds", "How long the first of those in the router queue has waited",
            ["cluster"], registry=r,
        )  # fmt: skip


class LatencyMetrics:
    """How long requests took, and the tokens in them."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.ttft = Histogram(
            "kvproxy_ttft_seconds", "Request received to first body byte from upstream; of an answer that is not "
            "streamed that is its end", ["cluster", "endpoint", "model", "stream"], buckets=TTFT_BUCKETS_S, registry=r,
        )  # fmt: skip  # stream: true, false
        self.duration = Histogram(
            "kvproxy_request_duration_seconds", "Request received to its end",
            ["cluster", "endpoint", "model"], buckets=E2E_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.itl = Histogram(
            "kvproxy_itl_seconds", "Mean time between the tokens of a streamed answer, one observation a request",
            ["cluster", "endpoint", "model"], buckets=ITL_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "kvproxy_prompt_tokens", "Prompt tokens by the engines' count", ["cluster"], registry=r
        )
        self.cached_tokens = Counter(
            "kvproxy_cached_tokens", "Prompt tokens the engines served from cache", ["cluster"], registry=r
        )
        self.completion_tokens = Counter("kvproxy_completion_tokens", "Tokens generated", ["cluster"], registry=r)


class CacheUseMetrics:
    """What the engines' caches were good for."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.hit_ratio = CallbackGauge(
            "kvproxy_cache_hit_ratio", "Share served from cache, over the last 1000 requests by the engines' count",
            ["cluster", "by"], registry=r,
        )  # fmt: skip
        self.miss_ratio = CallbackGauge(
            "kvproxy_cache_miss_ratio", "What is missing to 1", ["cluster", "by"], registry=r
        )
        self.hit_window_requests = CallbackGauge(
            "kvproxy_cache_window_requests", "Requests these ratios are taken over", ["cluster"], registry=r
        )
        self.tier_hits = Counter(
            "kvproxy_tier_hits", "Requests placed where a tier was believed to hold some of the prompt",
            ["cluster", "tier"], registry=r,
        )  # fmt: skip
        self.tier_hit_tokens = Counter(
            "kvproxy_tier_hit_tokens", "Prompt tokens it was believed to hold", ["cluster", "tier"], registry=r
        )
        self.saved_tokens = Counter(
            "kvproxy_saved_prompt_tokens", "Prompt tokens not computed, being cached", ["model", "tenant"], registry=r
        )
        self.saved_seconds = Counter(
            "kvproxy_saved_prefill_seconds", "Engine seconds of prefill these would have taken, by learned speeds "
            "(of clusters whose policy or shadow policy learns them)", ["model", "tenant"], registry=r,
        )  # fmt: skip
        self.learned_tokens_per_s = CallbackGauge(
            "kvproxy_learned_prefill_tokens_per_second",
            "Prefill speed of a pool before attention, as learned; no series before the first sample",
            ["cluster"], registry=r,
        )  # fmt: skip
        self.learned_slowness = CallbackGauge(
            "kvproxy_learned_slowness",
            "An endpoint's prefill time against its pool's, as learned; no series before the first sample",
            ["cluster", "endpoint"], registry=r,
        )  # fmt: skip
        self.learned_onboarding = CallbackGauge(
            "kvproxy_learned_onboarding_seconds_per_token",
            "What bringing a token up from a tier takes, as learned; no series of tiers that nothing came from",
            ["cluster", "endpoint", "tier"], registry=r,
        )  # fmt: skip
        self.hit_windows = HitWindows()
        self.hit_ratio.set_source(self.hit_windows.hit_ratios)
        self.miss_ratio.set_source(self.hit_windows.miss_ratios)
        self.hit_window_requests.set_source(self.hit_windows.sizes)


class EndpointStateMetrics:
    """Endpoints."""

    def __init__(self, r: CollectorRegistry) -> None:
        where = ["cluster", "endpoint"]
        self.in_flight = Gauge("kvproxy_in_flight_requests", "Requests in flight", where, registry=r)
        self.in_flight_formerly = Gauge(
            "kvproxy_in_flight", "Deprecated name of kvproxy_in_flight_requests", where, registry=r
        )
        self.pending_prompt_tokens = Gauge(
            "kvproxy_pending_prompt_tokens", "Uncached prompt tokens without a first token", ["cluster", "endpoint"],
            registry=r,
        )  # fmt: skip
        self.adapters = Gauge(
            "kvproxy_endpoint_adapters", "LoRA adapters that its engine lists", ["cluster", "endpoint"], registry=r
        )
        self.up = Gauge("kvproxy_endpoint_up", "1: takes traffic", ["cluster", "endpoint"], registry=r)
        self.ejections = Counter(
            "kvproxy_ejections", "Endpoints taken out", ["cluster", "endpoint", "reason"], registry=r
        )
        self.cache_losses = Counter(
            "kvproxy_engine_cache_losses", "Times an endpoint's engine lost what it held, by how that was noticed",
            ["cluster", "endpoint", "reason"], registry=r,
        )  # fmt: skip  # restarted, cleared, forgot, asleep
        self.saturation = CallbackGauge(
            "kvproxy_saturation", "Prefill seconds that wait, an endpoint, over `autoscaling.wanted_wait`; "
            "no series where nothing learns speeds", ["cluster"], registry=r,
        )  # fmt: skip
        self.wanted_endpoints = CallbackGauge(
            "kvproxy_wanted_endpoints", "Endpoints that would bring this to 1, smoothed; to be rounded up, after the "
            "sum over all proxies", ["cluster"], registry=r,
        )  # fmt: skip
        self.probes = Counter("kvproxy_health_probes", "Active probes", ["cluster", "endpoint", "outcome"], registry=r)
        self.engine_priority_requests = Counter(
            "kvproxy_engine_priority_requests", "Requests that carried the number by which engines order what waits",
            ["cluster", "endpoint", "outcome"], registry=r,
        )  # fmt: skip  # sent, refused
        self.engine_priority_state = Gauge(
            "kvproxy_engine_priority_state", "1: this is what is known of the engine, where it is told a priority",
            ["cluster", "endpoint", "state"], registry=r,
        )  # fmt: skip  # unknown, obeys, ignores, refused, does_not_pay
        self.rank_refusals = Counter(
            "kvproxy_rank_refusals", "Requests whose data-parallel rank an engine did not know",
            ["cluster", "endpoint", "outcome"], registry=r,
        )  # fmt: skip  # renumbered, dropped, doubted, late
        self.discovery = Counter("kvproxy_discovery_updates", "Discovery results", ["cluster", "outcome"], registry=r)
        self.discovery_failing = Gauge(
            "kvproxy_discovery_failing", "1: this source of endpoints does not answer, and what it said last stands",
            ["cluster", "source"], registry=r,
        )  # fmt: skip


class ConnectionMetrics:
    """Connections to endpoints."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.connections = Gauge("kvproxy_upstream_connections", "Connections", ["state"], registry=r)
        self.connects = Counter("kvproxy_upstream_connects", "Connections tried", ["outcome"], registry=r)
        self.replays = Counter(
            "kvproxy_upstream_replays", "Requests sent again because a kept connection was dead", registry=r
        )


class PickerMetrics:
    """Requests that Envoy carries (`kvproxy picker`)."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvproxy_picker_requests", "Requests Envoy asked about, by how it sends their bodies", ["mode", "result"],
            registry=r,
        )  # fmt: skip  # buffered, duplex, headers; picked, refused, malformed, body_timeout, error
        self.served = Counter(
            "kvproxy_picker_served", "Answers by where they came from, against the pick", ["result"], registry=r
        )  # as_picked, fallback, elsewhere, unknown (no endpoint of ours), unreported, none (Envoy's own answer)
        self.seconds = Histogram(
            "kvproxy_picker_decision_seconds", "Whole body there to the endpoint named", buckets=LOCAL_BUCKETS_S,
            registry=r,
        )  # fmt: skip


class BoundMetrics:
    """Bounds: what is held against what may be."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.queue_depth = Gauge("kvproxy_queue_depth", "Entries held in a bounded place", ["queue"], registry=r)
        self.queue_limit = Gauge("kvproxy_queue_limit", "Bound of that place", ["queue"], registry=r)
        self.receipts = Counter(
            "kvproxy_receipts", "Decision receipts", ["result"], registry=r
        )  # written, dropped, failed
        self.ledger = Counter("kvproxy_ledger_entries", "Entries of the ledger", ["result"], registry=r)
        self.normalized = Counter(
            "kvproxy_normalized_requests", "Requests with a prompt that rules of `normalize` change",
            ["cluster", "rules", "result"], registry=r,
        )  # fmt: skip  # rewritten, left, failed
        self.normalize_state = Gauge(
            "kvproxy_normalize_state", "1: this is what is known of the rules on the cluster's traffic",
            ["cluster", "rules", "state"], registry=r,
        )  # fmt: skip  # trying, on, off
        self.rate_limited = Counter("kvproxy_rate_limited", "Requests refused by rate_limit", ["kind"], registry=r)
        self.auth_failures = Counter("kvproxy_auth_failures", "Requests refused by auth", ["reason"], registry=r)
        self.body_refused = Counter("kvproxy_bodies_refused", "Bodies over the limit", registry=r)
        self.connections_refused = Counter(
            "kvproxy_connections_refused", "Client connections beyond the bound", registry=r
        )
        self.bodies_full = Counter("kvproxy_bodies_full", "Bodies refused since too much was held", registry=r)
        self.bodies_held = Gauge("kvproxy_bodies_held_bytes", "Request bodies held, all together", registry=r)
        self.bodies_limit = Gauge("kvproxy_bodies_limit_bytes", "Bound of these", registry=r)
        self.breaker_state = Gauge("kvproxy_breaker_open", "1: open or half open", ["breaker"], registry=r)


class SyncMetrics:
    """Several processes that decide as one."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.status = Gauge(
            "kvproxy_sync_status", "1: so it stands with the other processes", ["state"], registry=r
        )  # joining, alone, synced, degraded
        self.consistency = CallbackGauge(
            "kvproxy_sync_consistency_ratio",
            "Of the prompts that others routed in the last minute, the share that is known here", registry=r,
        )  # fmt: skip
        self.peers = CallbackGauge("kvproxy_sync_peers", "Other processes, as they are heard", ["state"], registry=r)
        # alive, silent
        self.lag = CallbackGauge(
            "kvproxy_sync_peer_lag_seconds", "From another process to here, over its latest messages",
            ["peer", "quantile"], registry=r,
        )  # fmt: skip
        self.gaps = CallbackGauge(
            "kvproxy_sync_peer_gaps", "Times that something of another process was missing", ["peer"],
            counts=True, registry=r,
        )  # fmt: skip
        self.lost = CallbackGauge(
            "kvproxy_sync_peer_lost", "Prompts it routed that never became known here", ["peer"],
            counts=True, registry=r,
        )  # fmt: skip
        self.index_blocks = CallbackGauge(
            "kvproxy_sync_index_blocks", "Blocks in the approximate indexes of each process, as it says; peer `self`: "
            "this one", ["peer"], registry=r,
        )  # fmt: skip
        self.messages = Counter(
            "kvproxy_sync_messages", "Messages between processes", ["outcome"], registry=r
        )  # sent, received, malformed, failed
        self.bytes = Counter("kvproxy_sync_bytes", "Bytes of these", ["direction"], registry=r)  # in, out
        self.dropped = CallbackGauge(
            "kvproxy_sync_dropped",
            "`deltas` and `messages` that found no room and were never sent, messages `received` that found none, and "
            "deltas that `failed` to be applied",
            ["what"],
            counts=True,
            registry=r,
        )
        self.held = CallbackGauge(
            "kvproxy_sync_held_bytes",
            "Kept for the exchange: `deltas` not told yet (at most 16 MiB), messages `unsent` (16 MiB for a store, 8 "
            "for each worker), batches `sent` that may be asked for again (4 MiB), messages that came `early` "
            "(32 MiB), and while `joining` what others say and the snapshot (96 MiB)",
            ["what"], registry=r,
        )  # fmt: skip
        self.store_up = CallbackGauge(
            "kvproxy_sync_store_up", "1: what replicas meet at can be reached; not there where they meet at nothing",
            registry=r,
        )  # fmt: skip


class ProcessMetrics:
    """The process."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.reloads = Counter("kvproxy_reloads", "Configurations read again while running", ["result"], registry=r)
        for result in ("applied", "refused"):
            self.reloads.labels(result)
        self.build_info = Gauge("kvproxy_build_info", "1, with the version of kvproxy", ["version"], registry=r)
        self.build_info.labels(__version__).set(1)
        self.workers = CallbackGauge(
            "kvproxy_workers", "Workers that serve; no series where one process does all", registry=r
        )
        self.worker_restarts = Counter("kvproxy_worker_restarts", "Workers started again after they ended", registry=r)
        self.worker_hangs = Counter("kvproxy_worker_hangs", "Workers killed since they hung", registry=r)
        self.loop_lag = Histogram(
            "kvproxy_event_loop_lag_seconds", "How late the event loop woke a task, sampled four times a second",
            buckets=LAG_BUCKETS_S, registry=r,
        )  # fmt: skip


class Metrics:
    """The catalogue, bound to one registry (a fresh one unless given): a group for each room."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = Registry() if registry is None else registry
        self.request = RequestMetrics(self.registry)
        self.latency = LatencyMetrics(self.registry)
        self.cache = CacheUseMetrics(self.registry)
        self.endpoint = EndpointStateMetrics(self.registry)
        self.upstream = ConnectionMetrics(self.registry)
        self.kv_events = KvEventMetrics(self.registry)
        self.kvcache = KvCacheMetrics(self.registry)
        self.holdings = HoldingMetrics(self.registry)
        self.tiers = TierMetrics(self.registry)
        self.leases = LeaseMetrics(self.registry)
        self.transfers = TransferMetrics(self.registry)
        self.snapshot = SnapshotMetrics(self.registry)
        self.picker = PickerMetrics(self.registry)
        self.bounds = BoundMetrics(self.registry)
        self.sync = SyncMetrics(self.registry)
        self.process = ProcessMetrics(self.registry)
