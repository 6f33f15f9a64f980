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
#: name -> (help, label besides engine and model_name, values of that label)
GAUGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "num_requests_running": ("Number of requests in model execution batches.", "", ()),
    "num_requests_waiting": ("Number of requests waiting to be processed.", "", ()),
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason.",
        "reason",
        ("capacity", "deferred"),
    ),
    "engine_sleep_state": ("Engine sleep state.", "sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", "", ()),
}
#: As GAUGES; exposed with `_total`.
COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "estimated_flops_per_gpu": ("Estimated number of floating point operations per GPU.", "", ()),
    "estimated_read_bytes_per_gpu": ("Estimated number of bytes read from memory per GPU.", "", ()),
    "estimated_write_bytes_per_gpu": ("Estimated number of bytes written to memory per GPU.", "", ()),
    "prefix_cache_queries": ("Prefix cache queries, in terms of number of queried tokens.", "", ()),
    "prefix_cache_hits": ("Prefix cache hits, in terms of number of cached tokens.", "", ()),
    "external_prefix_cache_queries": ("External prefix cache queries, in tokens.", "", ()),
    "external_prefix_cache_hits": ("External prefix cache hits, in tokens.", "", ()),
    "mm_cache_queries": ("Multi-modal cache queries, in items.", "", ()),
    "mm_cache_hits": ("Multi-modal cache hits, in items.", "", ()),
    "num_preemptions": ("Cumulative number of preemption from the engine.", "", ()),
    "prompt_tokens": ("Number of prefill tokens processed.", "", ()),
    "prompt_tokens_by_source": (
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached": ("Number of cached prompt tokens (local + external).", "", ()),
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "generation_tokens": ("Number of generation tokens processed.", "", ()),
    "request_success": (
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
}
#: name -> (help, buckets)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _COUNTS),
    "request_generation_tokens": ("Number of generation tokens processed.", _COUNTS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _BATCH),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", _COUNTS),
    "request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _COUNTS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _BETWEEN),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _BETWEEN),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _WHOLE),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _WHOLE),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _WHOLE),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _WHOLE),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _WHOLE),
    "request_num_preemptions": ("Histogram of preemptions per request.", (1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": ("Histogram of new KV tokens computed during prefill.", _COUNTS),
}
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
#: Labels of cache_config_info that a simulated engine does not vary.
CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}
_COMMON = ("engine", "model_name")


class VllmMetrics:
    """Observes the engine's outputs; totals the engine itself counts are read when scraped."""

    def __init__(self, settings: VllmSettings, engine: Engine, *, started_at: float) -> None:
        self.started_at = started_at  # of the process, seconds since the epoch
        self.sleep_level: int | None = None  # None: it is awake
        self._has_adapters = bool(settings.loras)
        self._nixl = settings.nixl is not None
        self._engine = engine
        self._registry = CollectorRegistry()
        self._labels = {"engine": str(settings.rank), "model_name": settings.model}
        self._gauges = {
            name: Gauge(f"vllm:{name}", text, (*_COMMON, *_one(label)), registry=self._registry)
            for name, (text, label, _values) in GAUGES.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", text, (*_COMMON, *_one(label)), registry=self._registry)
            for name, (text, label, _values) in COUNTERS.items()
        }
        self._histograms = {name: self._histogram(name, text, buckets) for name, (text, buckets) in HISTOGRAMS.items()}
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
        totals = self._engine.counters
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
            for (running, waiting), at in self._engine.loras.seen.items()
        ]
        head = "# HELP vllm:lora_requests_info Running stats on lora requests.\n# TYPE vllm:lora_requests_info gauge\n"
        return (head + "".join(lines)).encode() if self._has_adapters else b""

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, _COMMON, buckets=buckets, registry=self._registry)
        return family.labels(**self._labels)

    def _touch(self, settings: VllmSettings) -> None:
        """Every series exists from the start, at zero, as in vLLM."""
        for families, metrics in ((GAUGES, self._gauges), (COUNTERS, self._counters)):
            for name, (_text, label, values) in families.items():
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
            "effective_attention_block_size": str(engine.block_size),
            "enable_prefix_caching": str(engine.prefix_caching),
            "engine": self._labels["engine"],
            "kv_cache_max_concurrency": str(float(tokens // settings.max_model_len)),
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(engine.capacity_blocks),
            "num_gpu_blocks_override": str(engine.capacity_blocks),
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
        decode_s = output.at - first.at
        observe["request_queue_time_seconds"].observe(first.admitted_at - first.submitted_at)
        observe["request_prefill_time_seconds"].observe(first.at - first.admitted_at)
        observe["request_prompt_tokens"].observe(request.prompt_tokens)
        observe["request_prefill_kv_computed_tokens"].observe(request.prompt_tokens - first.cached_tokens)
        observe["request_params_max_tokens"].observe(request.output_tokens)
        observe["request_max_num_generation_tokens"].observe(request.output_tokens)
        observe["request_params_n"].observe(1)
        observe["request_generation_tokens"].observe(output.output_tokens)
        observe["e2e_request_latency_seconds"].observe(output.at - first.submitted_at)
        observe["request_inference_time_seconds"].observe(output.at - first.admitted_at)
        observe["request_decode_time_seconds"].observe(decode_s)
        if output.output_tokens > 1:
            observe["request_time_per_output_token_seconds"].observe(decode_s / (output.output_tokens - 1))

    def _set(self, name: str, value: float, extra: str = "") -> None:
        label = GAUGES[name][1]
        self._gauges[name].labels(**self._labels, **({label: extra} if label else {})).set(value)

    def _count(self, name: str, total: float, extra: str = "") -> None:
        label = COUNTERS[name][1]
        key = (name, extra)
        grown = total - self._published.get(key, 0.0)
        self._published[key] = total
        self._counters[name].labels(**self._labels, **({label: extra} if label else {})).inc(grown)


def _one(label: str) -> tuple[str, ...]:
    return (label,) if label else ()
