"""Growing chats over two real vLLM servers: TTFT of later turns under one policy and another.

`python -m benchmarks.real_engines` starts the engines (installed by `make test-real`), runs every policy `--repeats`
times, interleaved, each time with new prompts, empty caches and a new `kvproxy serve`, and writes
`reports/real-engines.md` and `.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.real_engines_report import write
from tests.real.engines.place import MID, missing
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair
from tests.real.prompts import text
from tests.support.process import kvproxy_serve


@dataclass(frozen=True)
class Shape:
    """The traffic: so many sessions of so many turns, asked by so many clients at once."""

    sessions: int
    turns: int
    clients: int
    system_words: int
    turn_words: int
    answer_tokens: int


@dataclass(frozen=True)
class Turn:
    """One answer as the client saw it."""

    session: int
    turn: int  # from 1
    endpoint: str
    ttft_s: float  # request sent to first event received
    prompt_tokens: int
    cached_tokens: int


class Session:
    """A chat with a long system prompt of its own that grows by what was answered and asked."""

    def __init__(self, number: int, shape: Shape, *, seed: str) -> None:
        self.number = number
        self._shape = shape
        self._seed = f"{seed} session {number}"
        self._messages = [{"role": "system", "content": text(shape.system_words, seed=self._seed)}]
        self.asked = 0

    async def ask(self, http: httpx.AsyncClient) -> Turn:
        """Send the next turn, streamed."""
        self.asked += 1
        question = text(self._shape.turn_words, seed=f"{self._seed} turn {self.asked}")
        self._messages.append({"role": "user", "content": question})
        body = {
            "model": MID.name,
            "messages": self._messages,
            "max_tokens": self._shape.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        ttft_s, answered, usage = 0.0, "", dict[str, Any]()
        headers = {"x-session-id": self._seed}  # what policy `session` goes by
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            endpoint = response.headers["x-kvproxy-endpoint"]
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    ttft_s = ttft_s or time.perf_counter() - started
                    event = json.loads(line[6:])
                    answered += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    usage = event.get("usage") or usage
        self._messages.append({"role": "assistant", "content": answered})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Turn(self.number, self.asked, endpoint, ttft_s, usage["prompt_tokens"], cached)


async def one_run(proxy_url: str, shape: Shape, *, seed: str) -> list[Turn]:
    """All sessions through the proxy: they take turns, and each waits for its own answers."""
    waiting = deque(Session(number, shape, seed=seed) for number in range(shape.sessions))
    done: list[Turn] = []

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            session = waiting.popleft()
            done.append(await session.ask(http))
            if session.asked < shape.turns:
                waiting.append(session)

    async with httpx.AsyncClient(base_url=proxy_url, timeout=300) as http, asyncio.TaskGroup() as clients:
        for _ in range(shape.clients):
            clients.create_task(client(http))
    return done


def config_file(folder: str, pair: Pair, policy: str) -> str:
    """Write a configuration with nothing but endpoints and policy, on a free port."""
    path = Path(folder, f"{policy}.yaml")
    config = {"listen": "127.0.0.1:0", "admin": {"enabled": False}, "endpoints": pair.urls, "policy": policy}
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


async def measure(
    pair: Pair, policies: Sequence[str], shape: Shape, *, repeats: int, folder: str
) -> list[dict[str, Any]]:
    """Every policy in every repeat, each repeat beginning with another one."""
    runs = []
    for repeat in range(repeats):
        first = repeat % len(policies)
        for policy in [*policies[first:], *policies[:first]]:
            # The same prompts for all policies of a repeat: the caches were emptied in between.
            pair.forget()
            async with kvproxy_serve("-c", config_file(folder, pair, policy)) as proxy:
                started = time.perf_counter()
                turns = await one_run(proxy.url, shape, seed=f"repeat {repeat}")
                seconds = time.perf_counter() - started
            later = sorted(turn.ttft_s for turn in turns if turn.turn > 1)
            print(f"repeat {repeat + 1}, {policy}: later turns' TTFT p50 {later[len(later) // 2] * 1000:.0f} ms")
            rows = [asdict(turn) for turn in turns]
            runs.append({"repeat": repeat, "policy": policy, "seconds": seconds, "turns": rows})
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--policies", default="round_robin,session,kv_aware", help="the first one is what others compare to"
    )
    parser.add_argument("--repeats", type=int, default=3)
    for name, default in asdict(Shape(10, 5, 2, 1600, 60, 16)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = vars(parser.parse_args())
    if lacking := missing():
        print(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
        return 1
    shape = Shape(**{name: arguments[name] for name in Shape.__dataclass_fields__})
    policies = arguments["policies"].split(",")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_pair(Vllm("a", MID, core=0), Vllm("b", MID, core=1)) as pair,
    ):
        runs = asyncio.run(measure(pair, policies, shape, repeats=arguments["repeats"], folder=folder))
    write(arguments["out"], runs, shape=asdict(shape), policies=policies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
