"""Streams to engines that stand still now and then, with a second sending of late ones and without.

    python -m benchmarks.hedging [--requests N] [--rounds N]

Four simulated engines in this process, five requests a second by kv_aware, prompts of 600 tokens. Every eight seconds
another engine gives no first byte for five seconds, or none does. Rounds with and without `hedge` alternate. Writes
hedging.md of benchmarks/reports.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.markdown import table
from kvproxy.app import Proxy
from kvproxy.lab.replay.results import percentile
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

REPORT = Path(__file__).parent / "reports" / "hedging.md"
ENGINES = 4
GAP_S = 0.2
EVERY_S, STALL_S = 8.0, 5.0
WORDS = 300
ENGINE = EngineSettings(8192, 16, token_outputs=True, timing=EngineTiming(prefill_tokens_per_s=5_000.0))


async def read_first(client: httpx.AsyncClient, number: int, times: list[float]) -> None:
    """Note the time to the first byte of the body, and read to the end."""
    rng = random.Random(number)
    words = " ".join(str(rng.randrange(10_000)) for _ in range(WORDS))
    body = {"model": "sim", "prompt": words, "max_tokens": 8, "stream": True}
    began = time.monotonic()
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for piece in answer.aiter_bytes():
            if first is None and piece:
                first = time.monotonic() - began
    if answer.status_code == httpx.codes.OK and first is not None:
        times.append(first)


async def stall_in_turn(engines: list[VllmApp]) -> None:
    """Have one engine after the other stand still."""
    for engine in itertools.cycle(engines):
        engine.state.faults.update({"stall_first_byte_s": STALL_S})
        await asyncio.sleep(STALL_S)
        engine.state.faults.update({"stall_first_byte_s": 0.0})
        await asyncio.sleep(EVERY_S - STALL_S)


async def play(requests: int, *, hedge: bool, stalls: bool, seed: int) -> tuple[list[float], dict[str, float]]:
    """Return the sorted times to the first byte, and what became of second sendings."""
    async with AsyncExitStack() as stack:
        engines = []
        urls: dict[str, str] = {}
        for number in range(ENGINES):
            app = VllmApp(VllmSettings(model="sim", engine=ENGINE), rng=random.Random(number))
            engines.append(await stack.enter_async_context(app))
            urls[f"e{number}"] = (await stack.enter_async_context(Server(app, drain_s=0.2))).url
        raw: dict[str, Any] = {"endpoints": urls, "policy": "kv_aware", "hedge": hedge, "health": {"active": False}}
        proxy = await stack.enter_async_context(Proxy(load_config(raw), rng=random.Random(seed)))
        public = await stack.enter_async_context(Server(proxy, drain_s=0.2))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=public.url, timeout=60))
        stalling = asyncio.create_task(stall_in_turn(engines)) if stalls else None
        times: list[float] = []
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                group.create_task(read_first(client, seed * 100_000 + number, times))
                await asyncio.sleep(GAP_S)
        if stalling is not None:
            stalling.cancel()
        found = {}
        for result in ("won", "lost", "refused"):
            labels = {"cluster": "default", "result": result}
            found[result] = proxy.metrics.registry.get_sample_value("kvproxy_hedges_total", labels) or 0.0
        return sorted(times), found


def _about() -> str:
    return " ".join((__doc__ or "").partition("[--rounds N]")[2].split()).partition(" Writes")[0]


def main() -> None:
    """Play and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default %(default)s)")
    args = parser.parse_args()
    rows = []
    for stalls in (True, False):
        cells: dict[bool, list[float]] = {False: [], True: []}
        counts = {"won": 0.0, "lost": 0.0, "refused": 0.0}
        for seed, hedge in itertools.product(range(1, args.rounds + 1), (False, True)):
            times, found = asyncio.run(play(args.requests, hedge=hedge, stalls=stalls, seed=seed))
            cells[hedge] += times
            for result, count in found.items():
                counts[result] += count
        for hedge, times in cells.items():
            ordered = sorted(times)
            shown = [
                f"{1000 * one:.0f}"
                for one in (sum(ordered) / len(ordered), *(percentile(ordered, q) for q in (0.5, 0.9, 0.99)))
            ]
            twice = [f"{counts[name]:.0f}" for name in ("won", "lost", "refused")] if hedge else ["-"] * 3
            name = f"{'one engine stands still' if stalls else 'all go on'}, {'hedge' if hedge else 'none'}"
            rows.append([name, str(len(ordered)), *shown, *twice])
    heads = ["engines, second sending", "answered", "mean ms", "p50", "p90", "p99", "won", "lost", "refused"]
    lines = [
        "# Hedging for the first byte",
        "",
        f"`python -m benchmarks.hedging`. {_about()}",
    ]
    lines += table(heads, rows)
    text = "\n".join(lines) + "\n"
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
