"""The page that a scrape gets, written in slices so that no request waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from kvproxy.base.metrics.exposition import Registry, Texts
from kvproxy.base.types import Clock

#: How long a scrape holds the event loop before it yields.
SLICE_S = 0.0005


async def render_exposition(
    registry: Registry,
    *,
    slice_s: float = SLICE_S,
    clock: Clock = time.perf_counter,
    pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
) -> bytes:
    """Every series of the registry. The values of one series belong together; those of two may be a moment apart."""
    page: list[bytes] = []
    piece: list[str] = []
    end = clock() + slice_s
    for collector in list(registry.collectors):
        for text in _texts(collector):
            piece.append(text)
            if clock() >= end:
                page.append("".join(piece).encode())
                piece.clear()
                await pause()
                end = clock() + slice_s
    page.append("".join(piece).encode())
    return b"".join(page)


def _texts(collector: Collector) -> Iterator[str]:
    if isinstance(collector, Texts):
        yield from collector.texts()
    else:
        yield generate_latest(collector).decode()
