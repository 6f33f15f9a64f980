"""Live replay over real sockets, against simulated engines: its table against what the engines counted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvproxy.lab.replay.live import LiveReplay, LiveSettings
from kvproxy.lab.replay.report import report_live
from kvproxy.lab.replay.settings import Pace
from kvproxy.lab.replay.trace import Trace, parse_trace
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from tests.lab.replay.traces import lines
from tests.support.loopback import Server
from tests.support.proxy import running_proxy

BLOCK = 64


def tiny_trace() -> Trace:
    """Four chats of three turns over one system prompt, a few hundred tokens each."""
    rows = [
        {"timestamp": 5 * chat, "delay": 5, "session_id": chat, "input_length": (2 + 2 * turn) * BLOCK + 20,
         "output_length": 4, "hash_runs": [0, 1, 1000 * (chat + 1), 1 + 2 * turn]}
        for chat in range(4) for turn in range(3)
    ]  # fmt: skip
    for row in rows:
        del row["delay" if row["hash_runs"][-1] == 1 else "timestamp"]  # type: ignore[index]
    return parse_trace(lines(*rows, block_size=BLOCK), name="tiny")


@dataclass
class Engines:
    """Where they listen."""

    urls: dict[str, str]

    async def counted(self, name: str) -> tuple[int, int, int]:
        """Return requests, prompt tokens and cached tokens by one engine's own metrics."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.urls[name]}/metrics")).text
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total")
        return tuple(int(sums[each]) for each in names)  # type: ignore[return-value]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """Two of them."""
    settings = VllmSettings(model="tiny", engine=EngineSettings(8192, 16, token_outputs=True))
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(FleetSettings(clone_engines(settings, 2), controller=None)))
        servers = {n: await stack.enter_async_context(Server(app)) for n, app in fleet.engines.items()}
        yield Engines({name: server.url for name, server in servers.items()})


async def test_through_a_proxy_the_table_is_what_the_engines_counted(engines: Engines) -> None:
    """Requests, prompt tokens and cached tokens of each endpoint, and the hit rate over all."""
    settings = LiveSettings("")
    async with running_proxy(engines.urls, policy="round_robin") as running:
        settings = LiveSettings(running.url)
        replay = LiveReplay(tiny_trace(), Pace(), settings)
        await replay.run()
    report = report_live(tiny_trace(), replay, settings, Pace(), interrupted=False)
    assert (report.summary.requests, report.summary.failed) == (12, 0)
    counted = {name: await engines.counted(name) for name in engines.urls}
    assert {name: tuple(row.values()) for name, row in report.endpoints.items()} == counted
    prompt, cached = (sum(row[column] for row in counted.values()) for column in (1, 2))
    assert report.summary.hit_rate == pytest.approx(cached / prompt)
    assert 0 < report.summary.ttft_mean_s < report.summary.e2e_mean_s


async def test_a_single_engine_is_asked_directly(engines: Engines) -> None:
    """It names no endpoint."""
    settings = LiveSettings(engines.urls["sim-0"] + "/v1")
    replay = LiveReplay(tiny_trace(), Pace(closed_loop=False, service_s=0.01), settings)
    await replay.run()
    report = report_live(tiny_trace(), replay, settings, Pace(), interrupted=False)
    assert tuple(report.endpoints["(not named)"].values()) == await engines.counted("sim-0")
    assert await engines.counted("sim-1") == (0, 0, 0)


async def test_refusals_of_a_proxy_are_counted_apart(engines: Engines) -> None:
    """429 by its rate limit: neither an engine's work nor an answer."""
    filters = ["request_id", {"rate_limit": {"requests_per_minute": 6}}, "inference_request", "router"]
    async with running_proxy(engines.urls, filters=filters) as running:
        settings = LiveSettings(running.url, model="tiny")
        replay = LiveReplay(tiny_trace(), Pace(scale=0.0), settings)
        await replay.run()
    assert replay.failures == {"status 429": 6}
    assert sum([(await engines.counted(name))[0] for name in engines.urls]) == 6


async def test_an_engine_that_dies_fails_its_requests_only(engines: Engines) -> None:
    """The session goes on."""
    async with running_proxy({**engines.urls, "dead": "http://127.0.0.1:9"}, retry={"attempts": 1}) as running:
        replay = LiveReplay(tiny_trace(), Pace(scale=0.0), LiveSettings(running.url, model="tiny"))
        await replay.run()
    assert len(replay.outcomes) == 12
    assert set(replay.failures) == {"status 502"}
