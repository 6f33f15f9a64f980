"""Growing chats over one real vLLM with `--data-parallel-size 2`: how many later turns find their prefix, by steering.

`python -m benchmarks.data_parallel` starts the engine (installed by `make test-real`), runs every way `--repeats`
times, interleaved, each time with new prompts, empty caches and a new `kvproxy serve`, and writes
`reports/data-parallel.md` and `.json`. A later turn hits if the engine reused at least half of the chat's last prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.real_engines import Shape, Turn, one_run
from tests.real.engines import vllm
from tests.real.engines.place import MID, missing
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.support.process import kvproxy_serve

#: Settings of each way: the rank chosen by the engine (today's state), and by the proxy.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "engine balances": {"data_parallel": {"steer": False}, "kv_events": False},
    "steered, text index": {"data_parallel": {"ranks": [0, 1]}, "kv_events": False},
    "steered, found out, KV events": {"data_parallel": {}, "kv_events": True},
}
_FOUND_WITHIN_S = 30.0


def config_file(folder: str, server: Vllm, way: str) -> str:
    """One endpoint under kv_aware, on free ports."""
    settings = WAYS[way]
    config = {
        "listen": "127.0.0.1:0",
        "admin": {"enabled": False},
        "policy": "kv_aware",
        "endpoints": [{"id": "a", "url": server.url}],
        "data_parallel": settings["data_parallel"],
        "filters": ["request_id", "inference_request", {"kvcache": {"kv_events": settings["kv_events"]}}, "router"],
    }
    path = Path(folder, "config.yaml")
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


def forget(server: Vllm) -> None:
    """Both ranks' prefix caches are empty."""
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=10).raise_for_status()


async def await_ranks(url: str) -> None:
    """Ranks that are to be found out are endpoints of their own within seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http, asyncio.timeout(_FOUND_WITHIN_S):
        while True:
            body = {"model": MID.name, "prompt": "hello", "max_tokens": 1}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status()
            if "@" in answer.headers["x-kvproxy-endpoint"]:
                return
            await asyncio.sleep(0.2)


async def measure(server: Vllm, shape: Shape, *, repeats: int, folder: str) -> list[dict[str, Any]]:
    """Every way in every repeat, each repeat beginning with another one."""
    runs = []
    for repeat in range(repeats):
        first = repeat % len(WAYS)
        for way in [*WAYS, *WAYS][first : first + len(WAYS)]:
            # The same prompts for all ways of a repeat: the caches were emptied in between.
            await asyncio.to_thread(forget, server)
            async with kvproxy_serve("-c", config_file(folder, server, way)) as proxy:
                if WAYS[way]["data_parallel"].get("steer", True):
                    await await_ranks(proxy.url)
                started = time.perf_counter()
                turns = await one_run(proxy.url, shape, seed=f"repeat {repeat}")
                seconds = time.perf_counter() - started
            runs.append({"repeat": repeat, "way": way, "seconds": seconds, "turns": [asdict(turn) for turn in turns]})
            print(f"repeat {repeat + 1}, {way}: {hits(turns):.0%} of later turns hit", flush=True)
    return runs


def hits(turns: Sequence[Turn]) -> float:
    """The share of later turns whose engine reused at least half of what the chat's turn before had as its prompt."""
    prompts = {(turn.session, turn.turn): turn.prompt_tokens for turn in turns}
    later = [turn for turn in turns if turn.turn > 1]
    return statistics.fmean(turn.cached_tokens >= prompts[turn.session, turn.turn - 1] / 2 for turn in later)


def report(runs: Sequence[Mapping[str, Any]], shape: Shape, command: str) -> str:
    """The table for people."""
    lines = [
        "# One real vLLM with two data-parallel ranks, growing chats",
        "",
        f"`{command}`",
        "",
        f"{_machine()} shared by vLLM 0.32.0 (CPU build, `--data-parallel-size 2`, a core a rank), the proxy and the "
        f"clients. {shape.sessions} sessions of {shape.turns} turns, each with a system prompt of its own, "
        f"{shape.clients} clients at once, answers of {shape.answer_tokens} tokens. Ways interleaved on the same "
        "prompts, caches emptied in between. A later turn hits if the engine reused at least half of the chat's last "
        "prompt, by its own count.",
        "",
        "| repeat | the rank | later turns that hit | later prompt tokens reused | later turns' TTFT p50, ms |",
        "|---|---|---|---|---|",
    ]
    numbers = sorted({run["repeat"] for run in runs})
    for repeats in [*([number] for number in numbers), numbers]:
        for way in WAYS:
            chosen = [run for run in runs if run["way"] == way and run["repeat"] in repeats]
            lines.append(_row(str(repeats[0] + 1) if len(repeats) == 1 else "all", way, chosen))
    return "\n".join(lines) + "\n"


def _row(repeat: str, way: str, runs: Sequence[Mapping[str, Any]]) -> str:
    turns = [[Turn(**turn) for turn in run["turns"]] for run in runs]
    later = [turn for run in turns for turn in run if turn.turn > 1]
    reused = sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)
    ttft_ms = statistics.median(turn.ttft_s for turn in later) * 1000
    hit = statistics.fmean(hits(run) for run in turns)
    return f"| {repeat} | {way} | {hit:.0%} | {reused:.0%} | {ttft_ms:.0f} |"


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()},"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    for name, default in asdict(Shape(8, 5, 2, 800, 60, 8)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = vars(parser.parse_args())
    if lacking := missing():
        print(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
        return 1
    shape = Shape(**{name: arguments[name] for name in Shape.__dataclass_fields__})
    server = Vllm("a", MID, core=0, ranks=2)
    with tempfile.TemporaryDirectory() as folder, vllm.running([server]):
        warm_up(server)
        runs = asyncio.run(measure(server, shape, repeats=arguments["repeats"], folder=folder))
    command = shlex.join(["python", "-m", "benchmarks.data_parallel", *sys.argv[1:]])
    words = report(runs, shape, command)
    document = {"command": command, "machine": _machine(), "shape": asdict(shape), "runs": runs}
    arguments["out"].mkdir(parents=True, exist_ok=True)
    (arguments["out"] / "data-parallel.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments["out"] / "data-parallel.md").write_text(words)
    print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
