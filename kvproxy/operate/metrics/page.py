"""The page that a scrape gets, written in slices so that no request waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from kvproxy.base.background_task import SLICE_S, in_slices
from kvproxy.base.metrics.exposition import Registry, Texts
from kvproxy.base.types import Clock


async def render_exposition(
    registry: Registry,
    *,
    slice_s: float = SLICE_S,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> bytes:
    """Every series of the registry. The values of one series belong together; those of two may be a moment apart."""
    texts = (text for collector in list(registry.collectors) for text in _texts(collector))
    return b"".join([text.encode() async for text in in_slices(texts, slice_s=slice_s, clock=clock, sleep=sleep)])


def _texts(collector: Collector) -> Iterator[str]:
    if isinstance(collector, Texts):
        yield from collector.texts()
    else:
        yield generate_latest(collector).decode()
