"""The page of metrics itself: how large it is, how long it takes, and how long that holds the event loop."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import generate_latest

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from kvproxy.operate.metrics.page import render_exposition

MODELS = tuple(f"model-{number}" for number in range(4))
STATUSES = (200, 400, 404, 429, 500, 502, 503)


@dataclass(frozen=True)
class Page:
    """One page of metrics, rendered in a process with nothing else to do. Milliseconds, medians."""

    endpoints: int
    page_bytes: int
    series: int
    render_ms: float
    held_ms: float  # the longest without a turn for others
    library_ms: float  # prometheus_client's renderer, which holds the loop as long as it takes


def configuration(ports: Sequence[int], *, listen: int = 0, admin: int = 0) -> dict[str, object]:
    """kv_aware over that many engines, each serving every model; the chain that is used when none is written."""
    endpoints = [
        {"id": f"engine-{number}", "url": f"http://127.0.0.1:{port}", "models": list(MODELS)}
        for number, port in enumerate(ports)
    ]
    addresses = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}"}
    return {**addresses, "policy": "kv_aware", "endpoints": endpoints}


async def page(endpoints: int) -> Page:
    """Return the page of a proxy whose endpoints have answered with every model and status."""
    async with Proxy(load_config(configuration(range(1, endpoints + 1)))) as proxy:
        for endpoint in proxy.clusters["default"].endpoints:
            for model in MODELS:
                latency = endpoint.metrics.find_latency(model)
                assert latency is not None
                for distribution in (latency.ttft, latency.itl, latency.duration):
                    distribution.observe(0.1234)
            for status in STATUSES:
                endpoint.metrics.count_request(status)
        registry = proxy.metrics.registry
        whole_ms, held_ms, library_ms = [], [], []
        for _ in range(30):
            turns = [time.perf_counter()]

            async def pause(_: float, turns: list[float] = turns) -> None:
                turns.append(time.perf_counter())

            text = await render_exposition(registry, sleep=pause)
            turns.append(time.perf_counter())
            whole_ms.append(1e3 * (turns[-1] - turns[0]))
            held_ms.append(1e3 * max(after - before for before, after in itertools.pairwise(turns)))
            generate_latest(registry)
            library_ms.append(1e3 * (time.perf_counter() - turns[-1]))
        middle = (statistics.median(values) for values in (whole_ms[5:], held_ms[5:], library_ms[5:]))
        return Page(endpoints, len(text), _series(text), *middle)


def _series(text: bytes) -> int:
    return sum(not line.startswith(b"#") for line in text.splitlines())
