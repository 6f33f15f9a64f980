"""`/metrics` of a simulated vLLM: the real names, labels and meanings."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvproxy.simulator.engine import Engine
from kvproxy.simulator.engine_io import EngineOutput, Finished, FirstToken, Tokens
from kvproxy.simulator.engine_runner import Generation
from kvproxy.simulator.vllm_metric_names import (
    CACHE_CONFIG,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    REJECTION_REASONS,
)
from kvproxy.simulator.vllm_settings import VllmSettings

_COMMON = ("engine", "model_name")


class VllmMetrics:
    """Observes the engine's outputs; totals the engine itself counts are read when scraped."""

    def __init__(self, settings: VllmSettings, engine: Engine, *, started_at: float) -> None:
        self.started_at = started_at  # of the process, seconds since the epoch
        self._engine = engine
        self._registry = CollectorRegistry()
        rank = settings.kv_events.rank if settings.kv_events is not None else 0
        self._labels = {"engine": str(rank), "model_name": settings.model}
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

    def observe(self, generation: Generation, output: EngineOutput) -> None:
        """Takes in one output before the generation itself does. As in vLLM, a request's own times count when it ends,
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

    def forget(self, request_id: str) -> None:
        """A request left without finishing."""
        self._last_token_at.pop(request_id, None)

    def rejected(self, reason: str) -> None:
        """A queue limit turned a request away."""
        self._rejections.labels(self._labels["model_name"], reason).inc()

    def exposition(self) -> bytes:
        """The text a scrape gets."""
        load, totals = self._engine.load, self._engine.counters
        self._set("num_requests_running", load.running)
        self._set("num_requests_waiting", load.waiting)
        self._set("num_requests_waiting_by_reason", load.waiting, "capacity")
        self._set("kv_cache_usage_perc", load.kv_usage)
        hits = totals.prefix_cache_hits
        self._count("prefix_cache_queries", totals.prefix_cache_queries)
        self._count("prefix_cache_hits", hits)
        self._count("num_preemptions", totals.preemptions)
        self._count("prompt_tokens", totals.prompt_tokens)
        self._count("prompt_tokens_by_source", totals.prompt_tokens - hits, "local_compute")
        self._count("prompt_tokens_by_source", hits, "local_cache_hit")
        self._count("prompt_tokens_cached", hits)
        self._count("prompt_tokens_cached_by_source", hits, "device")
        self._count("generation_tokens", totals.generation_tokens)
        return generate_latest(self._registry)

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
        self._set("engine_sleep_state", 1, "awake")
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

    def _first_token(self, generation: Generation, output: FirstToken) -> None:
        self._histograms["time_to_first_token_seconds"].observe(output.at - output.submitted_at)
        self._last_token_at[output.request_id] = output.at

    def _finished(self, generation: Generation, output: Finished) -> None:
        self._counters["request_success"].labels(**self._labels, finished_reason=output.reason).inc()
        self._last_token_at.pop(output.request_id, None)
        first = generation.first
        assert first is not None, "an engine reports a first token before it finishes"
        request, observe, decode_s = generation.request, self._histograms, output.at - first.at
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
        label, key = COUNTERS[name][1], (name, extra)
        grown = total - self._published.get(key, 0.0)
        self._published[key] = total
        self._counters[name].labels(**self._labels, **({label: extra} if label else {})).inc(grown)


def _one(label: str) -> tuple[str, ...]:
    return (label,) if label else ()
