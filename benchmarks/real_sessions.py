"""Agents beyond the memory of two real vLLM servers: sessions admitted by memory against all at once.

`python -m benchmarks.real_sessions` starts the engines (installed by `make test-real`) with little KV memory, plays the
same agents with and without `admit_sessions`, interleaved, each time with empty caches and a new `kvproxy serve`, and
writes `reports/real-sessions.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.markdown import table
from tests.real.engines.place import MID, missing
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.pair import Pair, running_pair
from tests.real.prompts import text
from tests.support.process import kvproxy_serve

#: Blocks of each engine's memory.
BLOCKS = 256
TURNS = 8
SYSTEM_WORDS = 120
TURN_WORDS = 150
ANSWER_TOKENS = 8
GAP_S = 0.2


@dataclass
class Agent:
    """An agent that calls tools without a pause, from its first prompt to its last answer. It sends no session id."""

    number: int
    began_at: float = 0.0
    ended_at: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    largest: int = 0
    waits_s: list[float] = field(default_factory=list)  # to the first event

    async def run(self, http: httpx.AsyncClient, *, seed: str) -> None:
        """Play all turns."""
        self.began_at = time.perf_counter()
        messages = [{"role": "system", "content": text(SYSTEM_WORDS, seed="all agents")}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": text(TURN_WORDS, seed=f"{seed} {self.number} {turn}")})
            answer = await self._ask(http, messages)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(GAP_S)
        self.ended_at = time.perf_counter()

    async def _ask(self, http: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        body = {
            "model": MID.name,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        answered = ""
        waited_s = 0.0
        usage: dict[str, Any] = {}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    waited_s = waited_s or time.perf_counter() - started
                    event = json.loads(line[6:])
                    answered += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    usage = event.get("usage") or usage
        self.waits_s.append(waited_s)
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.largest = usage["prompt_tokens"]
        return answered


@dataclass(frozen=True)
class Run:
    """Figures of one batch."""

    agents: int
    admits: bool
    sessions_per_hour: float
    session_s: float
    hit_rate: float
    wait_max_s: float
    needs: float  # contexts at their largest, over the memory


def config_file(folder: str, pair: Pair, *, admits: bool) -> str:
    """Write the configuration of a run, on a free port."""
    path = Path(folder, f"{admits}.yaml")
    config = {
        "listen": "127.0.0.1:0",
        "admin": {"enabled": False},
        "endpoints": pair.urls,
        "admit_sessions": admits,
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


async def play(pair: Pair, agents: int, *, admits: bool, seed: str, folder: str) -> Run:
    """Play a batch of agents that begin at once."""
    pair.forget()
    played = [Agent(number) for number in range(agents)]
    limits = httpx.Limits(max_connections=agents)
    async with (
        kvproxy_serve("-c", config_file(folder, pair, admits=admits)) as proxy,
        httpx.AsyncClient(base_url=proxy.url, timeout=600, limits=limits) as http,
    ):
        await asyncio.sleep(6.0)  # the engines' memory is read by then
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for agent in played:
                group.create_task(agent.run(http, seed=seed))
        took_s = time.perf_counter() - began
    prompts = sum(agent.prompt_tokens for agent in played)
    return Run(
        agents=agents,
        admits=admits,
        sessions_per_hour=3600 * agents / took_s,
        session_s=statistics.mean(agent.ended_at - agent.began_at for agent in played),
        hit_rate=sum(agent.cached_tokens for agent in played) / prompts,
        wait_max_s=max(wait for agent in played for wait in agent.waits_s),
        needs=sum(agent.largest for agent in played) / (2 * BLOCKS * BLOCK_TOKENS),
    )


def write(path: Path, runs: list[Run]) -> None:
    """Write the report."""
    rows = []
    for agents in sorted({run.agents for run in runs}):
        for admits in (False, True):
            same = [run for run in runs if (run.agents, run.admits) == (agents, admits)]
            mean = {
                name: statistics.mean(getattr(run, name) for run in same)
                for name in ("needs", "sessions_per_hour", "session_s", "hit_rate", "wait_max_s")
            }
            rows.append(
                [
                    str(agents),
                    f"{mean['needs']:.1f}",
                    "admitted by memory" if admits else "all at once",
                    f"{mean['sessions_per_hour']:.0f}",
                    f"{mean['session_s']:.1f}",
                    f"{mean['hit_rate']:.3f}",
                    f"{mean['wait_max_s']:.1f}",
                    str(len(same)),
                ]
            )
    heads = ["agents", "needs", "sessions", "sessions/h", "session s", "hit", "wait max s", "runs"]
    lines = [
        "# Agents beyond the memory of real engines",
        "",
        "`python -m benchmarks.real_sessions`",
        "",
        f"Two vLLM servers on a core each, {BLOCKS * BLOCK_TOKENS:,} tokens of KV memory each, a small model. Agents",
        f"of {TURNS} turns that begin at once, send no session id and pause {GAP_S} s between turns. *needs*: their",
        "contexts at their largest over the memory. *hit*: prompt tokens found in cache, by the engines' own usage.",
        "*wait max*: longest time to first token. The load generator and the proxy share the two cores with the",
        "engines: ratios between rows count.",
        "",
        *table(heads, rows),
    ]
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default="10,20", help="at once, runs of each (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports" / "real-sessions.md")
    arguments = parser.parse_args()
    if lacking := missing():
        print(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
        return 1
    runs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running_pair(Vllm("a", MID, core=0, blocks=BLOCKS), Vllm("b", MID, core=1, blocks=BLOCKS)) as pair,
    ):
        for repeat in range(arguments.repeats):
            for agents in map(int, arguments.agents.split(",")):
                for admits in (False, True):
                    seed = f"repeat {repeat}"
                    run = asyncio.run(play(pair, agents, admits=admits, seed=seed, folder=folder))
                    print(run, flush=True)
                    runs.append(run)
    write(arguments.out, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
