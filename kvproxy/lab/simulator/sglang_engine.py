"""The engines of a simulated SGLang server, one a data-parallel rank, with what they publish: KV events, and `/metrics`
by the real names."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineOutput,
    Finished,
    FirstToken,
    KvEvent,
)
from kvproxy.lab.simulator.engine_runner import EngineRunner, SequenceProgress
from kvproxy.lab.simulator.kv_event_publisher import EventEncoder, EventEncoding, KvEventPublisher, PublisherSettings
from kvproxy.lab.simulator.sglang_radix_pages import RadixPages
from kvproxy.lab.simulator.sglang_settings import EventForm, EventSettings, SglangSettings

#: Prefix of the ids of health checks' requests, which figures leave out.
HEALTH_CHECK = "HEALTH_CHECK_"
_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_STAGES = tuple(0.001 * 1.62**power for power in range(30))
#: Labels of the scheduler's series; the tokenizer's own have the model alone.
_SCHEDULER = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
GAUGES = (
    *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "cache_hit_rate"),
    *("max_total_num_tokens", "page_size", "num_pages", "gen_throughput"),
)


class SglangMetrics:
    """Metrics from the outputs of all ranks; the engine's own counts are read when scraped. Schedulers have a `dp_rank`
    label if there are several, the tokenizer counts for all of them."""

    def __init__(self, settings: SglangSettings, engines: Sequence[Engine]) -> None:
        self._settings = settings
        self._engines = engines
        self._registry = CollectorRegistry()
        self._model = {"model_name": settings.model}
        self._labels = [{**self._model, **_SCHEDULER, **_rank_label(settings, rank)} for rank in range(len(engines))]
        self._gauges = {name: self._gauge(name) for name in GAUGES}
        self._prompt, self._generated = self._counter("prompt_tokens"), self._counter("generation_tokens")
        self._requests = self._counter("num_requests")
        self._cached = self._counter("cached_tokens", "cache_source")
        self._realtime = self._counter("realtime_tokens", "mode", scheduler=True)
        self._ttft = self._histogram("time_to_first_token_seconds", _FIRST)
        self._queued = self._histogram("queue_time_seconds", _FIRST, scheduler=True)
        self._whole = self._histogram("e2e_request_latency_seconds", _FIRST)
        self._stages = self._histogram("per_stage_req_latency_seconds", _STAGES, "stage", scheduler=True)

    def observe(self, rank: int, generation: SequenceProgress, output: EngineOutput) -> None:
        """Count a prefill when it is done, a request's tokens when it ends; those of a health check never."""
        request = generation.request
        if request.id.startswith(HEALTH_CHECK):
            return
        if isinstance(output, FirstToken):
            self._observe_prefill(self._labels[rank], request.prompt_tokens, output)
        elif isinstance(output, Finished) and generation.first is not None:
            self._prompt.labels(**self._model).inc(request.prompt_tokens)
            self._generated.labels(**self._model).inc(output.output_tokens)
            self._requests.labels(**self._model).inc()
            if generation.first.cached_tokens:
                self._cached.labels(**self._model, cache_source="device").inc(generation.first.cached_tokens)
            self._whole.labels(**self._model).observe(output.at - generation.first.submitted_at)

    def render_exposition(self) -> bytes:
        """Return the text of a scrape."""
        for engine, labels in zip(self._engines, self._labels, strict=True):
            for name, value in self._values(engine).items():
                self._gauges[name].labels(**labels).set(value)
        return generate_latest(self._registry)

    def _observe_prefill(self, labels: dict[str, str], prompt_tokens: int, output: FirstToken) -> None:
        computed = prompt_tokens - output.cached_tokens
        for mode, tokens in (("prefill_compute", computed), ("prefill_cache", output.cached_tokens)):
            if tokens:
                self._realtime.labels(**labels, mode=mode).inc(tokens)
        self._ttft.labels(**self._model).observe(output.at - output.submitted_at)
        self._queued.labels(**labels).observe(output.admitted_at - output.submitted_at)
        self._stages.labels(**labels, stage="prefill_forward").observe(output.at - output.admitted_at)

    def _values(self, engine: Engine) -> dict[str, float]:
        load = engine.load
        totals = engine.scheduler.counters
        settings = self._settings
        return {
            "num_running_reqs": load.running,
            "num_queue_reqs": load.waiting,
            "num_used_tokens": round(load.kv_usage * settings.max_total_num_tokens),
            "token_usage": load.kv_usage,
            "cache_hit_rate": totals.prefix_cache_hits / max(1, totals.prefix_cache_queries),
            "max_total_num_tokens": settings.max_total_num_tokens,
            "page_size": settings.page_size,
            "num_pages": settings.engine.capacity_blocks,
        }

    def _gauge(self, name: str) -> Gauge:
        return Gauge(f"sglang:{name}", name, tuple(self._labels[0]), registry=self._registry)

    def _counter(self, name: str, label: str = "", *, scheduler: bool = False) -> Counter:
        return Counter(f"sglang:{name}", name, self._names(label, scheduler), registry=self._registry)

    def _histogram(
        self, name: str, buckets: tuple[float, ...], label: str = "", *, scheduler: bool = False
    ) -> Histogram:
        names = self._names(label, scheduler)
        return Histogram(f"sglang:{name}", name, names, buckets=buckets, registry=self._registry)

    def _names(self, label: str, scheduler: bool) -> tuple[str, ...]:
        return (*(self._labels[0] if scheduler else self._model), *((label,) if label else ()))


def _rank_label(settings: SglangSettings, rank: int) -> dict[str, str]:
    return {"dp_rank": str(rank)} if settings.dp_size > 1 else {}


class SglangEngine:
    """One data-parallel rank, which runs while its `parts` do. `on_output` is called with what it makes."""

    def __init__(
        self,
        settings: SglangSettings,
        rank: int,
        *,
        clock: Clock,
        wall_clock: Callable[[], float],
        on_output: Callable[[int, SequenceProgress, EngineOutput], None],
    ) -> None:
        self.rank = rank
        events = settings.kv_events
        scheduler = replace(settings.scheduler, kv_events=events is not None, lookahead_tokens=int(settings.paired))
        self.pages = pages = RadixPages(
            scheduler.capacity_blocks, page_size=settings.page_size, record_events=events is not None
        )
        self.engine = Engine(scheduler, cache=pages)
        self.publisher = None if events is None else _publisher(settings, events, rank, wall_clock)
        self.runner = EngineRunner(
            self.engine,
            clock=clock,
            on_events=None if self.publisher is None else self.publisher.publish,
            on_output=lambda generation, output: on_output(rank, generation, output),
        )
        parts: list[contextlib.AbstractAsyncContextManager[object]] = [self.runner]
        self.parts = parts if self.publisher is None else [self.publisher, *parts]

    def reset_prefix_cache(self) -> bool:
        """Reset the prefix cache; returns False while anything runs."""
        return self.engine.scheduler.cache.clear()


def _publisher(
    settings: SglangSettings, events: EventSettings, rank: int, wall_clock: Callable[[], float]
) -> KvEventPublisher:
    """On ports of its own, as far above the first rank's as its number."""
    where = PublisherSettings(
        host=events.host,
        port=events.port + rank if events.port else 0,
        replay_port=events.replay_port + rank if events.replay_port else 0,
        topic=events.topic,
        encoding=EventEncoding.V0_24,  # its replays name no topic
        buffer_steps=events.buffer_steps,
        rank=rank,
    )
    encoder = PageEncoder(page_size=settings.page_size, form=events.form, paired=settings.paired)
    return KvEventPublisher(where, encoder=encoder, wall_clock=wall_clock, replay=events.replay)


def with_event_ports(settings: SglangSettings) -> SglangSettings:
    """With ports for the events of several ranks, which have to be neighbours, where none are given."""
    events = settings.kv_events
    size = settings.dp_size
    if events is None or size == 1 or events.port:
        return settings
    first = _free_ports(2 * size, host=events.host)
    return replace(settings, kv_events=replace(events, port=first, replay_port=first + size))


def _free_ports(count: int, *, host: str) -> int:
    """Return the first of so many in a row, below those that programs are given by chance."""
    chance = random.SystemRandom()
    while True:
        first = chance.randrange(20_000, 30_000 - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((host, port))
            return first


_MEDIUM = "GPU"


class PageEncoder(EventEncoder):
    """As SGLang does, a page at a time."""

    def __init__(self, *, page_size: int, form: EventForm, paired: bool) -> None:
        super().__init__(block_size=page_size)
        self._page_size = page_size
        self._paired = paired
        if form is EventForm.ARRAY:
            self.write = lambda fields: [value for name, value in fields.items() if name != "cache_salt"]

    def list_fields(self, events: Sequence[KvEvent]) -> Iterator[dict[str, Any]]:
        """Yield the fields of each page's event."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                yield {"type": "AllBlocksCleared"}
            elif isinstance(event, BlockRemoved):
                yield {"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": _MEDIUM}
            else:
                yield from self._pages(event)

    def _pages(self, event: BlockStored) -> Iterator[dict[str, Any]]:
        parent = event.parent
        size = self._page_size
        tokens = event.token_ids
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
