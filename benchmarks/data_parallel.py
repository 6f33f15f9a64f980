"""Growing chats over one vLLM with `--data-parallel-size 2`: how many later turns find their prefix, by steering.

`python -m benchmarks.data_parallel` starts the engine (installed by `make test-real`; `--simulated` needs none), runs
every way `--repeats` times, interleaved, each time with new prompts, empty caches and a new `kvproxy serve`, and writes
`reports/data-parallel.md` and `.json` (`data-parallel-simulated`). A later turn hits if the engine reused the chat's
last prompt, but for two blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.real_engines import Session, Shape, Turn
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from tests.real.engines import vllm
from tests.real.engines.place import MID, TINY, missing
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.pair import warm_up
from tests.support.loopback import serve
from tests.support.process import kvproxy_serve
from tests.support.vllms.ranks import RankedSettings, RankedVllm

#: Settings of each way: the rank chosen by the engine (today's state), and by the proxy.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "engine balances": {"data_parallel": {"steer": False}, "kv_events": False},
    "steered, text index": {"data_parallel": {"ranks": [0, 1]}, "kv_events": False},
    "steered, found out, KV events": {"data_parallel": {}, "kv_events": True},
}
_FOUND_WITHIN_S = 30.0


def config_file(folder: str, engine_url: str, way: str) -> str:
    """One endpoint under kv_aware, on free ports."""
    settings = WAYS[way]
    config = {
        "listen": "127.0.0.1:0",
        "admin": {"enabled": False},
        "policy": "kv_aware",
        "endpoints": [{"id": "a", "url": engine_url}],
        "data_parallel": settings["data_parallel"],
        "filters": ["request_id", "inference_request", {"kvcache": {"kv_events": settings["kv_events"]}}, "router"],
    }
    path = Path(folder, "config.yaml")
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


async def forget(engine_url: str) -> None:
    """Both ranks' prefix caches are empty."""
    async with httpx.AsyncClient(timeout=10) as http:
        (await http.post(f"{engine_url}/reset_prefix_cache")).raise_for_status()


async def await_ranks(url: str) -> None:
    """Ranks that are to be found out are endpoints of their own within seconds."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http, asyncio.timeout(_FOUND_WITHIN_S):
        while True:
            body = {"model": MID.name, "prompt": "hello", "max_tokens": 1}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status()
            if "@" in answer.headers["x-kvproxy-endpoint"]:
                return
            await asyncio.sleep(0.2)


async def shuffled_run(proxy_url: str, shape: Shape, *, seed: str) -> list[Turn]:
    """Every session's next turn in each round, in another order: an engine that takes turns must not meet a pattern."""
    sessions = [Session(number, shape, seed=seed) for number in range(shape.sessions)]
    rng, done = random.Random(seed), list[Turn]()

    async def client(http: httpx.AsyncClient, waiting: list[Session]) -> None:
        while waiting:
            done.append(await waiting.pop().ask(http))

    async with httpx.AsyncClient(base_url=proxy_url, timeout=300) as http:
        for _ in range(shape.turns):
            waiting = rng.sample(sessions, len(sessions))
            async with asyncio.TaskGroup() as clients:
                for _ in range(shape.clients):
                    clients.create_task(client(http, waiting))
    return done


async def measure_simulated(shape: Shape, *, repeats: int, folder: str) -> list[dict[str, Any]]:
    """On an engine in this process."""
    rank = VllmSettings(
        model=MID.name,
        max_model_len=MID.max_tokens,
        engine=EngineSettings(4096, BLOCK_TOKENS, token_outputs=True),
        kv_events=PublisherSettings(),
    )
    async with RankedVllm(RankedSettings(rank)) as engine, serve(engine) as url:
        return await measure(url, shape, repeats=repeats, folder=folder)


async def measure(engine_url: str, shape: Shape, *, repeats: int, folder: str) -> list[dict[str, Any]]:
    """Every way in every repeat, each repeat beginning with another one."""
    runs = []
    for repeat in range(repeats):
        first = repeat % len(WAYS)
        for way in [*WAYS, *WAYS][first : first + len(WAYS)]:
            # The same prompts for all ways of a repeat: the caches were emptied in between.
            await forget(engine_url)
            async with kvproxy_serve("-c", config_file(folder, engine_url, way)) as proxy:
                if WAYS[way]["data_parallel"].get("steer", True):
                    await await_ranks(proxy.url)
                started = time.perf_counter()
                turns = await shuffled_run(proxy.url, shape, seed=f"repeat {repeat}")
                seconds = time.perf_counter() - started
            runs.append({"repeat": repeat, "way": way, "seconds": seconds, "turns": [asdict(turn) for turn in turns]})
            print(f"repeat {repeat + 1}, {way}: {hits(turns):.0%} of later turns hit", flush=True)
    return runs


def hits(turns: Sequence[Turn]) -> float:
    """Return the share of later turns whose engine reused the prompt of the chat's turn before, but for two blocks."""
    prompts = {(turn.session, turn.turn): turn.prompt_tokens for turn in turns}
    later = [turn for turn in turns if turn.turn > 1]
    wanted = [prompts[turn.session, turn.turn - 1] - 2 * BLOCK_TOKENS for turn in later]
    return statistics.fmean(turn.cached_tokens >= least for turn, least in zip(later, wanted, strict=True))


def report(runs: Sequence[Mapping[str, Any]], shape: Shape, *, command: str, engine: str) -> str:
    """Return the table for people."""
    lines = [
        "# One vLLM with two data-parallel ranks, growing chats",
        "",
        f"`{command}`",
        "",
        f"{_machine()} shared by {engine}, the proxy and the clients. {shape.sessions} sessions of {shape.turns} "
        f"turns, each with its own system prompt, {shape.clients} clients at once, answers of {shape.answer_tokens} "
        "tokens, sessions in another order in every round. Ways interleaved on the same prompts, caches emptied in "
        "between. A later turn hits if the engine reused the chat's last prompt, but for two blocks, by its own count.",
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
    parser.add_argument("--simulated", action="store_true", help="kvproxy's own stand-in for vLLM")
    parser.add_argument("--model", choices=[TINY.name, MID.name], default=MID.name)
    for name, default in asdict(Shape(8, 5, 2, 800, 60, 8)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = vars(parser.parse_args())
    simulated = arguments["simulated"]
    if not simulated and (lacking := missing()):
        print(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
        return 1
    shape = Shape(**{name: arguments[name] for name in Shape.__dataclass_fields__})
    repeats, engine = arguments["repeats"], "a simulated vLLM (two ranks, in this process)"
    with tempfile.TemporaryDirectory() as folder:
        if simulated:
            runs = asyncio.run(measure_simulated(shape, repeats=repeats, folder=folder))
        else:
            model = copy(MID if arguments["model"] == MID.name else TINY)
            model.name = MID.name  # what clients ask for
            engine = f"vLLM 0.32.0 (CPU build, model {arguments['model']}, `--data-parallel-size 2`, a core a rank)"
            server = Vllm("ranks", model, core=0, ranks=2)
            with vllm.running([server]):
                warm_up(server)
                runs = asyncio.run(measure(server.url, shape, repeats=repeats, folder=folder))
    command = shlex.join(["python", "-m", "benchmarks.data_parallel", *sys.argv[1:]])
    words = report(runs, shape, command=command, engine=engine)
    document = {"command": command, "machine": _machine(), "engine": engine, "shape": asdict(shape), "runs": runs}
    arguments["out"].mkdir(parents=True, exist_ok=True)
    name = "data-parallel-simulated" if simulated else "data-parallel"
    (arguments["out"] / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments["out"] / f"{name}.md").write_text(words)
    print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
