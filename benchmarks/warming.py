"""TTFT of the first requests after an engine lost its cache, with automatic warming and without.

    python -m benchmarks.warming            # writes benchmarks/reports/warming.md and warming.json; five minutes

Two simulated vLLM servers behind the proxy over HTTP. Eight documents are asked about again and again; then one of the
servers loses its cache, as in a restart, and some seconds later the questions go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import httpx

from benchmarks.report import machine
from kvproxy.app import Proxy
from kvproxy.config.load import load_config
from kvproxy.listener.server import Server
from kvproxy.replay.results import percentile
from kvproxy.replay.settings import make_block
from kvproxy.simulator.engine_io import EngineSettings
from kvproxy.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.simulator.kv_event_publisher import PublisherSettings
from kvproxy.simulator.vllm_settings import VllmSettings

HERE = Path(__file__).parent
DOCUMENTS, WORDS = 8, 3000
BEFORE, AFTER, RATE = 80, 50, 2.0
PAUSE_S = 5.0
ROUNDS = 2


async def play(*, warming: bool, seed: int) -> dict[str, float]:
    """One run; figures of the requests after the loss."""
    rng = Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        server = VllmSettings(model="sim", engine=EngineSettings(20_000, 16, token_outputs=True),
                              kv_events=PublisherSettings())  # fmt: skip
        fleet = await stack.enter_async_context(Fleet(FleetSettings(clone_engines(server, 2), None), rng=rng))
        urls = {name: (await stack.enter_async_context(Server(app))).url for name, app in fleet.engines.items()}
        settings = {"kv_events": True, "engine_metrics_interval": "500ms", "warming": {"enabled": warming}}
        filters = ["request_id", "inference_request", {"kvcache": settings}, "router"]
        config = load_config({"endpoints": urls, "policy": "kv_aware", "filters": filters})
        proxy = await stack.enter_async_context(Proxy(config, rng=Random(seed)))
        public = await stack.enter_async_context(Server(proxy))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=public.url, timeout=120))
        await _ask_all(client, BEFORE, rng)
        async with httpx.AsyncClient(timeout=60) as engine:
            await engine.post(f"{urls['sim-0']}/reset_prefix_cache")
        await asyncio.sleep(PAUSE_S)
        found = await _ask_all(client, AFTER, rng)
        warmed = proxy.metrics.registry.get_sample_value(
            "kvproxy_kvcache_actions_total", {"action": "warm", "result": "done"}
        )
    ttft = sorted(each for each, _, _ in found)
    prompt, cached = (sum(each[column] for each in found) for column in (1, 2))
    return {
        "mean_s": fmean(ttft),
        "p50_s": percentile(ttft, 0.5),
        "p90_s": percentile(ttft, 0.9),
        "longest_s": ttft[-1],
        "hit_rate": cached / prompt,
        "warmed": warmed or 0.0,
    }


async def _ask_all(client: httpx.AsyncClient, count: int, rng: Random) -> Sequence[tuple[float, int, int]]:
    """Poisson arrivals; TTFT, prompt and cached tokens of each."""
    async with asyncio.TaskGroup() as tasks:
        asked = []
        for _ in range(count):
            await asyncio.sleep(rng.expovariate(RATE))
            asked.append(tasks.create_task(_ask(client, rng.randrange(DOCUMENTS), rng.randrange(2**40))))
    return [each.result() for each in asked]


async def _ask(client: httpx.AsyncClient, document: int, question: int) -> tuple[float, int, int]:
    messages = [
        {"role": "system", "content": make_block(document + 1, WORDS)},
        {"role": "user", "content": make_block(question, 40)},
    ]
    body = {"model": "sim", "messages": messages, "max_tokens": 8, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    began, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if not first and event["choices"] and event["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - began
                usage = event.get("usage") or usage
    return first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def main() -> int:
    """With and without in turn, and the report."""
    about, runs = machine(2, "python -m benchmarks.warming"), {"without": [], "with": []}  # type: ignore[var-annotated]
    for seed in range(1, ROUNDS + 1):
        for name in runs:
            runs[name].append(asyncio.run(play(warming=name == "with", seed=seed)))
            print(name, runs[name][-1], flush=True)
    means = {name: {key: fmean(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    ratios = [a["mean_s"] / b["mean_s"] for a, b in zip(runs["with"], runs["without"], strict=True)]
    rows = [
        f"| {name} | {each['mean_s']:.3f} | {each['p50_s']:.3f} | {each['p90_s']:.3f} | {each['longest_s']:.3f} | "
        f"{each['hit_rate']:.3f} | {each['warmed']:.1f} |"
        for name, each in means.items()
    ]
    lines = [
        "# The first requests after an engine lost its cache",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        f"Two simulated vLLM servers, {DOCUMENTS} documents of about {WORDS} words, {RATE:g} requests a second; one "
        "server's cache is",
        f"dropped (`/reset_prefix_cache`, as a restart does) after {BEFORE} requests, and {PAUSE_S:g} s later the next "
        f"{AFTER} begin. Means of {ROUNDS} rounds, in turn;",
        f"TTFT in s, mean with warming to without, round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}.",
        "",
        "| warming | TTFT of the first 50 | p50 | p90 | longest | hit | prefixes warmed |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    (HERE / "reports" / "warming.json").write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n")
    (HERE / "reports" / "warming.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
