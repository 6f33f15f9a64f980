"""The engine of a simulated SGLang server: scheduler, radix pages, figures, and the events that it publishes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from kvproxy.simulator.engine import Engine
from kvproxy.simulator.engine_io import EngineLoad, EngineOutput
from kvproxy.simulator.engine_runner import EngineRunner, SequenceProgress
from kvproxy.simulator.kv_event import KvEvent
from kvproxy.simulator.kv_event_publisher import EventEncoding, KvEventPublisher, PublisherSettings
from kvproxy.simulator.sglang.events import PageEncoder
from kvproxy.simulator.sglang.exposition import SglangMetrics
from kvproxy.simulator.sglang.radix_pages import RadixPages
from kvproxy.simulator.sglang.settings import SglangSettings
from kvproxy.types import Clock

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
