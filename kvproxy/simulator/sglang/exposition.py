"""`/metrics` of a simulated SGLang: the real names, labels and meanings. No process tells when it began."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvproxy.simulator.engine import Engine
from kvproxy.simulator.engine_io import EngineOutput, Finished, FirstToken
from kvproxy.simulator.engine_runner import SequenceProgress
from kvproxy.simulator.sglang.settings import SglangSettings

_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_STAGES = tuple(0.001 * 1.62**power for power in range(30))
#: Of what the scheduler says; the tokenizer's own series have the model alone.
_SCHEDULER = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
GAUGES = (
    *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "cache_hit_rate"),
    *("max_total_num_tokens", "page_size", "num_pages", "gen_throughput"),
)


class SglangMetrics:
    """Observes the engine's outputs; what the engine itself counts is read when scraped."""

    def __init__(self, settings: SglangSettings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._registry = CollectorRegistry()
        self._model = {"model_name": settings.model}
        self._labels = {**self._model, **_SCHEDULER}
        self._gauges = {name: self._gauge(name) for name in GAUGES}
        self._prompt, self._generated = self._counter("prompt_tokens"), self._counter("generation_tokens")
        self._requests = self._counter("num_requests")
        self._cached = self._counter("cached_tokens", "cache_source")
        self._realtime = self._counter("realtime_tokens", "mode", scheduler=True)
        self._ttft = self._histogram("time_to_first_token_seconds", _FIRST)
        self._queued = self._histogram("queue_time_seconds", _FIRST, scheduler=True)
        self._whole = self._histogram("e2e_request_latency_seconds", _FIRST)
        self._stages = self._histogram("per_stage_req_latency_seconds", _STAGES, "stage", scheduler=True)

    def observe(self, generation: SequenceProgress, output: EngineOutput) -> None:
        """A prefill counts when it is done, a request's tokens when it ends."""
        request = generation.request
        if isinstance(output, FirstToken):
            computed = request.prompt_tokens - output.cached_tokens
            for mode, tokens in (("prefill_compute", computed), ("prefill_cache", output.cached_tokens)):
                if tokens:
                    self._realtime.labels(**self._labels, mode=mode).inc(tokens)
            self._ttft.labels(**self._model).observe(output.at - output.submitted_at)
            self._queued.labels(**self._labels).observe(output.admitted_at - output.submitted_at)
            stage = self._stages.labels(**self._labels, stage="prefill_forward")
            stage.observe(output.at - output.admitted_at)
        elif isinstance(output, Finished) and generation.first is not None:
            self._prompt.labels(**self._model).inc(request.prompt_tokens)
            self._generated.labels(**self._model).inc(output.output_tokens)
            self._requests.labels(**self._model).inc()
            if generation.first.cached_tokens:
                self._cached.labels(**self._model, cache_source="device").inc(generation.first.cached_tokens)
            self._whole.labels(**self._model).observe(output.at - generation.first.submitted_at)

    def render_exposition(self) -> bytes:
        """The text a scrape gets."""
        load, totals, settings = self._engine.load, self._engine.counters, self._settings
        values = {
            "num_running_reqs": load.running,
            "num_queue_reqs": load.waiting,
            "num_used_tokens": round(load.kv_usage * settings.max_total_num_tokens),
            "token_usage": load.kv_usage,
            "cache_hit_rate": totals.prefix_cache_hits / max(1, totals.prefix_cache_queries),
            "max_total_num_tokens": settings.max_total_num_tokens,
            "page_size": settings.page_size,
            "num_pages": settings.engine.capacity_blocks,
        }
        for name, value in values.items():
            self._gauges[name].labels(**self._labels).set(value)
        return generate_latest(self._registry)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(f"sglang:{name}", name, tuple(self._labels), registry=self._registry)

    def _counter(self, name: str, label: str = "", *, scheduler: bool = False) -> Counter:
        return Counter(f"sglang:{name}", name, self._names(label, scheduler), registry=self._registry)

    def _histogram(
        self, name: str, buckets: tuple[float, ...], label: str = "", *, scheduler: bool = False
    ) -> Histogram:
        names = self._names(label, scheduler)
        return Histogram(f"sglang:{name}", name, names, buckets=buckets, registry=self._registry)

    def _names(self, label: str, scheduler: bool) -> tuple[str, ...]:
        return (*(self._labels if scheduler else self._model), *((label,) if label else ()))
