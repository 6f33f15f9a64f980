"""Every metric kvproxy exposes, declared once.

Labels come from closed or bounded sets; children are kept, not looked up. A component takes the `Metrics` object, or
the group or the one metric it needs. A group's docstring is its heading in docs/metrics.md.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from kvproxy import __version__
from kvproxy.metrics.collectors import CallbackGauge, Counter, Histogram
from kvproxy.metrics.exposition import Registry
from kvproxy.metrics.present import HitWindows

#: As far as `timeouts.first_byte` goes.
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COST_BUCKETS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0, 100_000.0)  # seconds, blocks, scores
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LOCAL_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)
LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
FAST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


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
        )  # fmt: skip  # device, lower
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


class KvEventMetrics:
    """KV events: one stream per endpoint and data-parallel rank."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.batches = Counter(
            "kvproxy_kv_event_batches", "Batches by what became of them", ["endpoint", "outcome"], registry=r
        )  # applied, replayed, duplicate, malformed
        self.blocks = Counter("kvproxy_kv_event_blocks", "Blocks in events", ["endpoint", "kind"], registry=r)
        self.skipped = Counter(
            "kvproxy_kv_events_skipped", "Events that could not be used", ["endpoint", "reason"], registry=r
        )  # unknown_type, malformed
        self.gaps = Counter(
            "kvproxy_kv_event_gaps", "Breaks in the numbering", ["endpoint", "outcome"], registry=r
        )  # filled, lost, restart
        self.behind = Counter(
            "kvproxy_kv_event_behind", "Times a stream brought batches faster than they were applied",
            ["endpoint"], registry=r,
        )  # fmt: skip
        self.lag = Gauge(
            "kvproxy_kv_event_lag_seconds", "Published to applied, last batch", ["endpoint", "rank"], registry=r
        )
        self.state = Gauge(
            "kvproxy_kv_event_stream_state", "1: the stream is in this state", ["endpoint", "rank", "state"], registry=r
        )  # connecting, exact, degraded, approximate


class KvCacheMetrics:
    """Which endpoints hold a prefix: what was asked, predicted, and true."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.facts_seconds = Histogram(
            "kvproxy_kvcache_facts_seconds", "Asking the indexes of the proxy itself about one prompt",
            buckets=LOCAL_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.lookups = Counter(
            "kvproxy_kvcache_lookups", "Requests by what came of asking LMCache before routing", ["outcome"], registry=r
        )  # hit, miss, lookup_timeout, error, breaker_open, busy, no_tokens
        self.lookup_seconds = Histogram(
            "kvproxy_kvcache_lookup_seconds", "One call of the lookup service, late answers included",
            buckets=FAST_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.tokenizes = Counter("kvproxy_kvcache_tokenizes", "Calls of /tokenize", ["outcome"], registry=r)
        self.tokenize_seconds = Histogram(
            "kvproxy_kvcache_tokenize_seconds", "One call of /tokenize", buckets=FAST_BUCKETS_S, registry=r
        )
        self.unknown_instances = Counter(
            "kvproxy_kvcache_unknown_instances", "Holders that are no endpoint's instance_id", registry=r
        )
        self.predictions = Counter(
            "kvproxy_kvcache_predictions", "Predicted matches by what the engine then reused",
            ["cluster", "endpoint", "source", "result"], registry=r,
        )  # fmt: skip  # hit, partial, miss
        self.predicted_tokens = Counter(
            "kvproxy_kvcache_predicted_tokens", "Matched tokens where requests went",
            ["cluster", "endpoint", "source"], registry=r,
        )  # fmt: skip
        self.reused_tokens = Counter(
            "kvproxy_kvcache_reused_tokens", "Of these, tokens the engine did reuse",
            ["cluster", "endpoint", "source"], registry=r,
        )  # fmt: skip
        self.sessions_ended = Counter(
            "kvproxy_kvcache_sessions_ended", "Sessions that their clients ended", ["result"], registry=r
        )  # known, unknown
        self.prediction_alarm = CallbackGauge(
            "kvproxy_kvcache_prediction_alarm", "1: of the last 8 large predictions at least 3 were wrong",
            ["cluster", "endpoint", "source"], registry=r,
        )  # fmt: skip
        self.prefix_break_tokens = Counter(
            "kvproxy_prefix_break_tokens", "Prompt tokens computed again although the session had sent them before",
            ["cause", "client"], registry=r,
        )  # fmt: skip
        self.trust = CallbackGauge(
            "kvproxy_kvcache_trust_ratio", "How far what only this source says of an endpoint is believed, once tried",
            ["cluster", "endpoint", "source"], registry=r,
        )  # fmt: skip


class HoldingMetrics:
    """What the indexes, the engines and token memory hold, and the work to keep it."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.index_blocks = Gauge(
            "kvproxy_kvcache_index_blocks", "Blocks held in an index, over endpoints", ["index"], registry=r
        )  # approximate, in_flight, precise, hot
        self.index_bytes = Gauge(
            "kvproxy_kvcache_index_bytes", "Estimated memory of an index", ["index"], registry=r
        )  # approximate, precise, sessions, session_parts, last_served
        self.last_served = Gauge(
            "kvproxy_kvcache_last_served", "Sessions and responses whose last endpoint is known", ["what"], registry=r
        )  # sessions, responses
        self.index_utilisation = CallbackGauge(
            "kvproxy_kvcache_index_utilisation_ratio", "Blocks believed to be at an endpoint against its capacity",
            ["cluster", "endpoint"], registry=r,
        )  # fmt: skip
        self.index_capacity = CallbackGauge(
            "kvproxy_kvcache_index_capacity_blocks", "Room in an endpoint's cache, as `told` by it and as `learned`",
            ["cluster", "endpoint", "kind"], registry=r,
        )  # fmt: skip
        self.reuse_step = CallbackGauge(
            "kvproxy_endpoint_reuse_step_tokens", "What an endpoint reuses is a multiple of this, where that is long",
            ["cluster", "endpoint"], registry=r,
        )  # fmt: skip
        self.endpoint_hit_ratio = CallbackGauge(
            "kvproxy_endpoint_cache_hit_ratio", "Share of prompt tokens reused since twelve readings of the engine ago",
            ["cluster", "endpoint", "by"], registry=r,
        )  # fmt: skip
        self.engine_foreign_ratio = CallbackGauge(
            "kvproxy_engine_foreign_tokens_ratio", "Prompt tokens the engine looked up that others sent, of all",
            ["cluster", "endpoint"], registry=r,
        )  # fmt: skip
        self.engine_kv_usage = CallbackGauge(
            "kvproxy_engine_kv_usage_ratio", "KV memory in use, by the engine's own metrics",
            ["cluster", "endpoint"], registry=r,
        )  # fmt: skip
        self.engine_requests = CallbackGauge(
            "kvproxy_engine_requests", "Requests in the engine, by its own metrics",
            ["cluster", "endpoint", "state"], registry=r,
        )  # fmt: skip  # running, waiting
        self.token_memory_entries = Gauge(
            "kvproxy_kvcache_token_memory_entries", "Prompts and beginnings in token memory", registry=r
        )
        self.token_memory_bytes = Gauge("kvproxy_kvcache_token_memory_bytes", "Bytes of token memory", registry=r)
        self.recalls = CallbackGauge(
            "kvproxy_kvcache_token_recalls", "Prompts by what token memory knew", ["result"], counts=True, registry=r
        )  # exact, prefix, missed
        self.actions = Counter(
            "kvproxy_kvcache_actions", "Pins, compressions and evictions", ["action", "result"], registry=r
        )
        self.background = Counter(
            "kvproxy_kvcache_background_jobs", "Work after responses", ["result"], registry=r
        )  # done, failed, timeout, duplicate, dropped, abandoned


class SnapshotMetrics:
    """What is kept over a restart."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.writes = Counter(
            "kvproxy_kvcache_snapshot_writes", "Snapshots written for the next start", ["outcome"], registry=r
        )  # written, failed
        self.restores = Counter(
            "kvproxy_kvcache_snapshot_restores", "Starts by what became of the snapshot", ["outcome"], registry=r
        )  # restored, none, or why it was not used
        self.bytes = CallbackGauge("kvproxy_kvcache_snapshot_bytes", "Size of the snapshot there is", registry=r)
        self.age = CallbackGauge(
            "kvproxy_kvcache_snapshot_age_seconds", "Time since the snapshot there is was taken", registry=r
        )


class BoundMetrics:
    """Bounds: what is held against what may be."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.queue_depth = Gauge("kvproxy_queue_depth", "Entries held in a bounded place", ["queue"], registry=r)
        self.queue_limit = Gauge("kvproxy_queue_limit", "Bound of that place", ["queue"], registry=r)
        self.receipts = Counter(
            "kvproxy_receipts", "Decision receipts", ["result"], registry=r
        )  # written, dropped, failed
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
        self.snapshot = SnapshotMetrics(self.registry)
        self.bounds = BoundMetrics(self.registry)
        self.process = ProcessMetrics(self.registry)
