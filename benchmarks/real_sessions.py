"""More agents than fit two real vLLMs with little KV memory: kvproxy with and without admission of sessions, and
vllm-router with `--enable-program-scheduling`.

    python -m benchmarks.real_sessions [--vllm-router PROGRAM] [--ratios 2,4] [--repeats N] [--out FOLDER]

Starts the engines (installed by `make test-real`). Every run has empty caches and a new router; the same prompts go
through each. Agents have a common system prompt, a task, and tools whose results their contexts grow by; between turns
they pause for 0.1 to 0.9 s. To kvproxy no header names a session; vllm-router gets `program_id`. Writes
real_sessions.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.markdown import table
from benchmarks.report import machine
from tests.real.engines.place import MID, missing, root
from tests.real.engines.program import Program
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.pair import Pair, running_pair
from tests.real.prompts import text
from tests.support.ports import free_ports
from tests.support.process import kvproxy_serve

BLOCKS = 128  # of each engine's memory
TURNS = 6
SYSTEM_WORDS, TASK_WORDS, RESULT_WORDS = 60, 120, 120
ANSWER_TOKENS = 16
ON, OFF, PEER = "kvproxy", "kvproxy, admit_sessions: false", "vllm-router"


class Answered(NamedTuple):
    """One session, as its client saw it."""

    took_s: float
    prompt_tokens: list[int]  # by turn
    refused: int  # times that a turn came again


class Figures(NamedTuple):
    """One run."""

    sessions_per_hour: float
    session_mean_s: float
    session_p90_s: float
    hit_rate: float  # prompt tokens that the engines found in cache, by their own counters
    refused: int
    context_tokens: float  # mean of all prompts


async def play_session(http: httpx.AsyncClient, number: int, *, seed: str, names: bool) -> Answered:
    """Play an agent to its end."""
    rng = random.Random(f"{seed} {number}")
    messages = [{"role": "system", "content": text(SYSTEM_WORDS, seed=f"{seed} system")}]
    program = json.dumps({"program_id": f"{seed}-{number}"})  # a text, since vLLM takes no objects there
    more: dict[str, Any] = {"vllm_xargs": {"agentic_context": program}} if names else {}
    prompts: list[int] = []
    refused = 0
    await asyncio.sleep(rng.uniform(0.0, 5.0))
    began = time.perf_counter()
    for turn in range(TURNS):
        words = RESULT_WORDS if turn else TASK_WORDS
        messages.append({"role": "user", "content": text(words, seed=f"{seed} session {number} turn {turn}")})
        limits = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        body = {"model": MID.name, "messages": messages, **limits, **more}
        while (response := await http.post("/v1/chat/completions", json=body)).status_code in (429, 503):
            refused += 1
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))
        if response.status_code != 200:
            raise AssertionError(response.text)
        answer = response.json()
        prompts.append(answer["usage"]["prompt_tokens"])
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        await asyncio.sleep(rng.uniform(0.1, 0.9))
    return Answered(time.perf_counter() - began, prompts, refused)


def count_tokens(pair: Pair) -> tuple[float, float]:
    """Return prompt tokens that both engines have looked up, and found."""
    sums = [0.0, 0.0]
    for url in pair.urls.values():
        for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
            for which, name in enumerate(("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")):
                if line.startswith(name):
                    sums[which] += float(line.rsplit(" ", 1)[1])
    return sums[0], sums[1]


async def play(url: str, pair: Pair, sessions: int, *, seed: str, names: bool) -> Figures:
    """Play a batch of sessions that all begin within 5 s."""
    asked, found = count_tokens(pair)
    began = time.perf_counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=1800, limits=limits) as http:
        played = (play_session(http, number, seed=seed, names=names) for number in range(sessions))
        answered = await asyncio.gather(*played)
    took_s = time.perf_counter() - began
    asked_after, found_after = count_tokens(pair)
    times = sorted(one.took_s for one in answered)
    return Figures(
        sessions_per_hour=3600.0 * sessions / took_s,
        session_mean_s=fmean(times),
        session_p90_s=times[int(0.9 * (sessions - 1))],
        hit_rate=(found_after - found) / (asked_after - asked),
        refused=sum(one.refused for one in answered),
        context_tokens=fmean(tokens for one in answered for tokens in one.prompt_tokens),
    )


def write_config(folder: str, pair: Pair, *, admits: bool) -> str:
    """Write a configuration with nothing but the endpoints, on a free port."""
    path = Path(folder, "config.yaml")
    config = {"listen": "127.0.0.1:0", "admin": {"enabled": False}, "endpoints": pair.urls, "admit_sessions": admits}
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


@contextlib.contextmanager
def vllm_router(program: str, pair: Pair) -> Iterator[str]:
    """Serve with program scheduling, the engines' true memory as its option has it."""
    port, metrics = free_ports(2)
    scheduling = {"token_capacity_per_dp_rank": BLOCKS * BLOCK_TOKENS, "global_queue": True}
    command = [program, "--worker-urls", *pair.urls.values(), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warning"]
    command += ["--enable-program-scheduling", "--program-scheduling-config-json", json.dumps(scheduling)]
    url = f"http://127.0.0.1:{port}"
    log = root() / "logs" / "vllm-router.log"
    running = Program("vllm-router", command, ready=f"{url}/health", log=log, environment={})
    with running:
        running.await_ready(within_s=120)
        yield url


async def measure(router: str, pair: Pair, sessions: int, *, seed: str, program: str) -> Figures:
    """Play the batch through one router, with empty caches."""
    pair.forget()
    if router == PEER:
        with vllm_router(program, pair) as url:
            return await play(url, pair, sessions, seed=seed, names=True)
    with tempfile.TemporaryDirectory() as folder:
        async with kvproxy_serve("-c", write_config(folder, pair, admits=router == ON)) as proxy:
            return await play(proxy.url, pair, sessions, seed=seed, names=False)


def write_report(folder: Path, runs: dict[tuple[float, int, str], list[Figures]], about: dict[str, str]) -> None:
    """Write the means, and every run's session time and hits."""
    rows = []
    for (ratio, sessions, router), figures in runs.items():
        mean = {name: fmean(getattr(one, name) for one in figures) for name in Figures._fields}
        each = " ".join(f"{one.session_mean_s:.0f}" for one in figures)
        cells = [
            f"{mean['sessions_per_hour']:.0f}",
            f"{mean['session_mean_s']:.0f} ({each})",
            f"{mean['session_p90_s']:.0f}",
        ]
        rows.append([f"{ratio:g}: {sessions}", router, *cells, f"{mean['hit_rate']:.2f}", f"{mean['refused']:.0f}"])
    context = fmean(one.context_tokens for figures in runs.values() for one in figures)
    memory = BLOCKS * BLOCK_TOKENS
    lines = [
        "# Agents on two real vLLMs with little memory",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        f"Two vLLM 0.32.0 servers (CPU build, a core each) of {memory:,} tokens of KV memory each; agents of {TURNS} "
        f"turns, {context:,.0f} tokens of context on average. Contexts over memory: number of agents, which all begin "
        "within 5 s. Sessions an hour; s from a session's first request to its last answer, mean (each run) and 90 %; "
        "share of prompt tokens found in cache, by the engines' own counters; times that a turn was refused and came "
        "again. The machine is shared with other work, whose load differs from run to run.",
        "",
        *table(["contexts: agents", "router", "sessions/h", "session s", "90 %", "hit", "refused"], rows),
        "",
    ]
    (folder / "real_sessions.md").write_text("\n".join(lines))
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", default="", help="its program (pip install vllm-router)")
    parser.add_argument("--ratios", default="2,4")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--context-tokens", type=float, default=1100.0, help="of an agent on average")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    asked = parser.parse_args()
    if lacking := missing():
        raise SystemExit(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
    about = machine(psutil.cpu_count() or 1, "python -m benchmarks.real_sessions")
    routers = (ON, *((PEER,) if asked.vllm_router else ()), OFF)
    runs: dict[tuple[float, int, str], list[Figures]] = {}
    engines = (Vllm(name, MID, core=core, blocks=BLOCKS) for core, name in enumerate("ab"))
    with running_pair(*engines) as pair:
        for repeat in range(asked.repeats):
            for ratio in map(float, asked.ratios.split(",")):
                sessions = round(ratio * 2 * BLOCKS * BLOCK_TOKENS / asked.context_tokens)
                for router in routers:
                    seed = f"{repeat} {ratio}"
                    figures = asyncio.run(measure(router, pair, sessions, seed=seed, program=asked.vllm_router))
                    runs.setdefault((ratio, sessions, router), []).append(figures)
                    print(repeat, ratio, router, figures, flush=True)
                    write_report(asked.out, runs, about)


if __name__ == "__main__":
    main()
