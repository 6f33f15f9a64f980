"""`/metrics` of a simulated vLLM 0.32: the real names, labels and meanings."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import EngineOutput, Finished, FirstToken, Tokens
from kvproxy.lab.simulator.engine_runner import SequenceProgress
from kvproxy.lab.simulator.vllm_settings import VllmSettings

#: Of engines with NixlConnector.
_NIXL = b"""# HELP vllm:nixl_num_failed_transfers_total Number of failed NIXL KV Cache transfers.
# TYPE vllm:nixl_num_failed_transfers_total counter
vllm:nixl_num_failed_transfers_total 0.0
"""
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_BATCH = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
#: name -> label besides engine and model_name, values of that label
Family = tuple[str, tuple[str, ...]]
_PLAIN: Family = ("", ())
GAUGES: dict[str, Family] = {
    "num_requests_running": _PLAIN,
    "num_requests_waiting": _PLAIN,
    "num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "kv_cache_usage_perc": _PLAIN,
}
#: As GAUGES; exposed with `_total`.
COUNTERS: dict[str, Family] = {
    "prefix_cache_queries": _PLAIN,
    "prefix_cache_hits": _PLAIN,
    "external_prefix_cache_hits": _PLAIN,
    "num_preemptions": _PLAIN,
    "prompt_tokens": _PLAIN,
    "prompt_tokens_by_source": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    "prompt_tokens_cached": _PLAIN,
    "prompt_tokens_cached_by_source": ("source", ("device", "host", "p2p", "disk", "external_unspecified")),
    "generation_tokens": _PLAIN,
    "request_success": ("finished_reason", ("stop", "length", "abort", "error", "repetition")),
}
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "request_prompt_tokens": _COUNTS,
    "iteration_tokens_total": _BATCH,
    "time_to_first_token_seconds": _FIRST,
    "inter_token_latency_seconds": _BETWEEN,
    "e2e_request_latency_seconds": _WHOLE,
    "request_prefill_time_seconds": _WHOLE,
    "request_prefill_kv_computed_tokens": _COUNTS,
}
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
#: Labels of cache_config_info that a simulated engine does not vary.
CACHE_CONFIG = {"gpu_memory_utilization": "0.92", "kv_offloading_size": "None", "prefix_caching_hash_algo": "sha256"}
_COMMON = ("engine", "model_name")


class VllmMetrics:
    """Observes the engine's outputs; totals the engine itself counts are read when scraped. Of vLLM's series those that
    a proxy or its operator reads."""

    def __init__(self, settings: VllmSettings, engine: Engine, *, started_at: float) -> None:
        self.started_at = started_at  # of the process, seconds since the epoch
        self.sleep_level: int | None = None  # None: it is awake
        self._has_adapters = bool(settings.loras)
        self._nixl = settings.nixl is not None
        self._engine = engine
        self._registry = CollectorRegistry()
        self._labels = {"engine": str(settings.rank), "model_name": settings.model}
        self._gauges = {
            name: Gauge(f"vllm:{name}", name, (*_COMMON, *_one(label)), registry=self._registry)
            for name, (label, _values) in GAUGES.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", name, (*_COMMON, *_one(label)), registry=self._registry)
            for name, (label, _values) in COUNTERS.items()
        }
        self._histograms = {name: self._histogram(name, buckets) for name, buckets in HISTOGRAMS.items()}
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        started = Gauge(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            registry=self._registry,
        )
        started.set_function(lambda: self.started_at)
        self._last_token_at: dict[str, float] = {}
        self._published: dict[tuple[str, str], float] = {}
        self._touch(settings)

    def observe(self, generation: SequenceProgress, output: EngineOutput) -> None:
        """Take in one output before the generation itself does. As in vLLM, a request's own times count when it ends,
        its first token and the time between tokens at once."""
        match output:
            case FirstToken():
                self._first_token(generation, output)
            case Tokens():
                last = self._last_token_at.get(output.request_id)
                if last is not None and output.at > last:
                    self._histograms["inter_token_latency_seconds"].observe(output.at - last)
                    self._last_token_at[output.request_id] = output.at
            case Finished():
                self._finished(generation, output)

    def forget_request(self, request_id: str) -> None:
        """Forget a request that left without finishing."""
        self._last_token_at.pop(request_id, None)

    def count_rejection(self, reason: str) -> None:
        """Count a request refused by a queue limit."""
        self._rejections.labels(self._labels["model_name"], reason).inc()

    def render_exposition(self) -> bytes:
        """Return the text of a scrape."""
        load = self._engine.load
        totals = self._engine.scheduler.counters
        self._set("num_requests_running", load.running)
        self._set("num_requests_waiting", load.waiting)
        self._set("num_requests_waiting_by_reason", load.waiting, "capacity")
        self._set("kv_cache_usage_perc", load.kv_usage)
        for level, state in ((None, "awake"), (1, "weights_offloaded"), (2, "discard_all")):
            self._set("engine_sleep_state", self.sleep_level == level, state)
        hits = totals.prefix_cache_hits
        read = totals.external_prefix_cache_hits
        self._count("prefix_cache_queries", totals.prefix_cache_queries)
        self._count("prefix_cache_hits", hits)
        self._count("external_prefix_cache_hits", read)
        self._count("num_preemptions", totals.preemptions)
        self._count("prompt_tokens", totals.prompt_tokens)
        self._count("prompt_tokens_by_source", totals.prompt_tokens - hits - read, "local_compute")
        self._count("prompt_tokens_by_source", hits, "local_cache_hit")
        self._count("prompt_tokens_by_source", read, "external_kv_transfer")
        self._count("prompt_tokens_cached", hits + read)
        self._count("prompt_tokens_cached_by_source", hits, "device")
        self._count("prompt_tokens_cached_by_source", read, "external_unspecified")
        self._count("generation_tokens", totals.generation_tokens)
        return generate_latest(self._registry) + self._adapters() + (_NIXL if self._nixl else b"")

    def _adapters(self) -> bytes:
        """Return a line for every combination there ever was; the newest has the largest value. No label names the
        model."""
        slots = self._engine.settings.max_loras
        lines = [
            f'vllm:lora_requests_info{{max_lora="{slots}",running_lora_adapters="{running}",'
            f'waiting_lora_adapters="{waiting}"}} {self.started_at + at!r}\n'
            for (running, waiting), at in self._engine.scheduler.loras.seen.items()
        ]
        head = "# HELP vllm:lora_requests_info Running stats on lora requests.\n# TYPE vllm:lora_requests_info gauge\n"
        return (head + "".join(lines)).encode() if self._has_adapters else b""

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", name, _COMMON, buckets=buckets, registry=self._registry)
        return family.labels(**self._labels)

    def _touch(self, settings: VllmSettings) -> None:
        """Every series exists from the start, at zero, as in vLLM."""
        for families, metrics in ((GAUGES, self._gauges), (COUNTERS, self._counters)):
            for name, (label, values) in families.items():
                for extra in [{label: value} for value in values] or [{}]:
                    metrics[name].labels(**self._labels, **extra)
        for reason in REJECTION_REASONS:
            self._rejections.labels(self._labels["model_name"], reason)
        self._describe_cache(settings)

    def _describe_cache(self, settings: VllmSettings) -> None:
        engine = settings.engine
        tokens = engine.capacity_blocks * engine.block_size
        config = {
            **CACHE_CONFIG,
            "block_size": str(engine.block_size),
            "enable_prefix_caching": str(engine.prefix_caching),
            "engine": self._labels["engine"],
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(engine.capacity_blocks),
        }
        names = sorted(config)
        text = "Information of the LLMEngine CacheConfig"
        info = Gauge("vllm:cache_config_info", text, names, registry=self._registry)
        info.labels(*(config[name] for name in names)).set(1)

    def _first_token(self, generation: SequenceProgress, output: FirstToken) -> None:
        self._histograms["time_to_first_token_seconds"].observe(output.at - output.submitted_at)
        self._last_token_at[output.request_id] = output.at

    def _finished(self, generation: SequenceProgress, output: Finished) -> None:
        self._counters["request_success"].labels(**self._labels, finished_reason=output.reason).inc()
        self._last_token_at.pop(output.request_id, None)
        first = generation.first
        assert first is not None, "an engine reports a first token before it finishes"
        request = generation.request
        observe = self._histograms
        observe["request_prefill_time_seconds"].observe(first.at - first.admitted_at)
        observe["request_prompt_tokens"].observe(request.prompt_tokens)
        observe["request_prefill_kv_computed_tokens"].observe(request.prompt_tokens - first.cached_tokens)
        observe["e2e_request_latency_seconds"].observe(output.at - first.submitted_at)

    def _set(self, name: str, value: float, extra: str = "") -> None:
        label = GAUGES[name][0]
        self._gauges[name].labels(**self._labels, **({label: extra} if label else {})).set(value)

    def _count(self, name: str, total: float, extra: str = "") -> None:
        label = COUNTERS[name][0]
        key = (name, extra)
        grown = total - self._published.get(key, 0.0)
        self._published[key] = total
        self._counters[name].labels(**self._labels, **({label: extra} if label else {})).inc(grown)


def _one(label: str) -> tuple[str, ...]:
    return (label,) if label else ()
