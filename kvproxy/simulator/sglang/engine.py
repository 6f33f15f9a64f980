"""The engine of a simulated SGLang server with what it publishes: KV events, and `/metrics` by the real names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvproxy.simulator.engine import Engine
from kvproxy.simulator.engine_io import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineLoad,
    EngineOutput,
    Finished,
    FirstToken,
    KvEvent,
)
from kvproxy.simulator.engine_runner import EngineRunner, SequenceProgress
from kvproxy.simulator.kv_event_publisher import EventEncoding, KvEventPublisher, PublisherSettings
from kvproxy.simulator.sglang.radix_pages import RadixPages
from kvproxy.simulator.sglang.settings import EventForm, SglangSettings
from kvproxy.types import Clock

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


_MEDIUM = "GPU"


class PageEncoder:
    """Turns one step's events into a message payload."""

    def __init__(self, *, page_size: int, form: EventForm, paired: bool) -> None:
        self._page_size = page_size
        self._form = form
        self._paired = paired
        self._encoder = msgspec.msgpack.Encoder()

    def encode_payload(self, events: Sequence[KvEvent], *, ts: float, rank: int = 0) -> bytes:
        """The msgpack batch; `ts` is wall-clock seconds, `rank` the attention's data-parallel rank."""
        written = [self._write(fields) for event in events for fields in self._fields(event)]
        return self._encoder.encode([ts, written, rank])

    def _fields(self, event: KvEvent) -> Iterator[dict[str, Any]]:
        if isinstance(event, AllBlocksCleared):
            yield {"type": "AllBlocksCleared"}
        elif isinstance(event, BlockRemoved):
            yield {"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": _MEDIUM}
        else:
            yield from self._pages(event)

    def _pages(self, event: BlockStored) -> Iterator[dict[str, Any]]:
        parent, size, tokens = event.parent, self._page_size, event.token_ids
        for number, page_hash in enumerate(event.block_hashes):
            page = tokens[number * size : (number + 1) * size + self._paired]
            keys = list(pairwise(page)) if self._paired else page
            salts = [key for keys_of_page in event.extra_keys[number : number + 1] for key in keys_of_page or ()]
            yield {
                "type": "BlockStored",
                "block_hashes": [page_hash],
                "parent_block_hash": parent,
                "token_ids": keys,
                "block_size": size,
                "lora_id": None,
                "medium": _MEDIUM,
                **({"cache_salt": salts[-1]} if salts else {}),
            }
            parent = page_hash

    def _write(self, fields: dict[str, Any]) -> Any:
        if self._form is EventForm.MAP:
            return fields
        return [value for name, value in fields.items() if name != "cache_salt"]


#: What the ids of requests begin with that health checks make: figures leave them out.
HEALTH_CHECK = "HEALTH_CHECK_"


class SglangEngine:
    """Runs while it is entered."""

    def __init__(self, settings: SglangSettings, *, clock: Clock, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        scheduler = dataclasses.replace(
            settings.scheduler, kv_events=settings.kv_events is not None, lookahead_tokens=int(settings.paired)
        )
        pages = RadixPages(
            scheduler.capacity_blocks, page_size=settings.page_size, record_events=settings.kv_events is not None
        )
        self._engine = Engine(scheduler, cache=pages)
        self.publisher = self._build_publisher(settings)
        self.runner = EngineRunner(self._engine, clock=clock, on_events=self._publish, on_output=self._observe)
        self.metrics = SglangMetrics(settings, self._engine)
        self._stack = contextlib.AsyncExitStack()

    @property
    def load(self) -> EngineLoad:
        """How busy it is."""
        return self._engine.load

    def reset_prefix_cache(self) -> bool:
        """Whether it could: not while anything runs."""
        return self._engine.reset_prefix_cache()

    async def __aenter__(self) -> SglangEngine:
        if self.publisher is not None:
            await self._stack.enter_async_context(self.publisher)
        await self._stack.enter_async_context(self.runner)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _build_publisher(self, settings: SglangSettings) -> KvEventPublisher | None:
        events = settings.kv_events
        if events is None:
            return None
        where = PublisherSettings(
            host=events.host,
            port=events.port,
            replay_port=events.replay_port,
            topic=events.topic,
            encoding=EventEncoding.V0_24,  # its replays name no topic
            buffer_steps=events.buffer_steps,
        )
        encoder = PageEncoder(page_size=settings.page_size, form=events.form, paired=settings.paired)
        return KvEventPublisher(where, encoder=encoder, wall_clock=self._wall_clock, replay=events.replay)

    async def _publish(self, events: Sequence[KvEvent]) -> None:
        if self.publisher is not None:
            await self.publisher.publish(events)

    def _observe(self, generation: SequenceProgress, output: EngineOutput) -> None:
        if not generation.request.id.startswith(HEALTH_CHECK):
            self.metrics.observe(generation, output)
