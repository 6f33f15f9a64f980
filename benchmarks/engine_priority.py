"""Mixed short and long prompts on a real vLLM that schedules by priority: TTFT with and without the number.

`python -m benchmarks.engine_priority` starts one engine (installed by `make test-real`) with few slots and again with
the default ones, finds out how many requests a second it takes, and asks at 0.9 of that in an open loop, through one
`kvproxy serve` for each mode of `engine_priority`. The modes take turns on the same arrivals and lengths, each prompt
is unique. Writes `reports/engine-priority.md` and `.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine_priority_report import write
from tests.real.engines import vllm
from tests.real.engines.place import MID, missing
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.real.prompts import text
from tests.support.ports import free_ports
from tests.support.process import kvproxy_serve

#: Sequences at once and tokens a step; vLLM's defaults on such a machine are the latter.
SLOTS = {"few": (4, 1024), "default": (256, 2048)}
SHORT_TOKENS, LONG_TOKENS, SHORT_SHARE = 200, 3000, 0.7
OUTPUT_TOKENS = 8
_CALIBRATION = 60
_NO_LIMIT = 100_000


@dataclass(frozen=True)
class Planned:
    """One request of a run: when, and how long its prompt is."""

    at_s: float
    tokens: int


@dataclass(frozen=True)
class Place:
    """A proxy in front of the engine, and where its operator asks."""

    url: str
    admin: str


def plan(count: int, per_s: float, *, seed: int) -> list[Planned]:
    """Poisson arrivals; the shares of lengths are exact, so that repeats carry the same work."""
    rng = random.Random(seed)
    short = round(SHORT_SHARE * count)
    lengths = [SHORT_TOKENS] * short + [LONG_TOKENS] * (count - short)
    rng.shuffle(lengths)
    now, planned = 0.0, []
    for tokens in lengths:
        now += rng.expovariate(per_s)
        planned.append(Planned(now, tokens))
    return planned


class Client:
    """Asks for unique prompts of so many tokens."""

    def __init__(self, words_per_token: float) -> None:
        self._words_per_token = words_per_token

    async def ask(self, http: httpx.AsyncClient, tokens: int, *, seed: str) -> dict[str, float]:
        """One streamed answer: seconds to its first event and to its end."""
        body = {
            "model": MID.name,
            "messages": [{"role": "user", "content": text(round(tokens * self._words_per_token), seed=seed)}],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began, ttft_s = time.perf_counter(), 0.0
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    ttft_s = ttft_s or time.perf_counter() - began
        return {"tokens": tokens, "ttft_s": ttft_s, "e2e_s": time.perf_counter() - began}

    async def play(self, url: str, planned: Sequence[Planned], *, seed: str) -> list[dict[str, float]]:
        """All of them, each at its time whatever became of those before."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            began = time.perf_counter()

            async def one(number: int, request: Planned) -> dict[str, float]:
                await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
                return await self.ask(http, request.tokens, seed=f"{seed} {number}")

            return await asyncio.gather(*[one(number, request) for number, request in enumerate(planned)])


def words_per_token(server: Vllm) -> float:
    """Of the made-up words, by the engine's own tokenizer."""
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text(1000, seed="words a token")}, timeout=30)
    return 1000 / float(answer.raise_for_status().json()["count"])


@contextlib.asynccontextmanager
async def proxies(server: Vllm, modes: Sequence[str], folder: str) -> AsyncIterator[dict[str, Place]]:
    """One for each mode, all there from the beginning: what each learns it keeps over its runs."""
    async with contextlib.AsyncExitStack() as stack:
        places = {}
        for mode, port in zip(modes, free_ports(len(modes)), strict=True):
            config = {
                "listen": "127.0.0.1:0",
                "admin": f"127.0.0.1:{port}",
                "endpoints": {"a": server.url},
                "policy": "kv_aware",
                "engine_priority": mode,
            }
            process = await stack.enter_async_context(kvproxy_serve("-c", written(folder, mode, config)))
            places[mode] = Place(process.url, f"http://127.0.0.1:{port}")
        yield places


def written(folder: str, mode: str, config: Mapping[str, Any]) -> str:
    """Write the configuration to a file and return its path."""
    path = Path(folder, f"{mode}.yaml")
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


async def measure(
    server: Vllm, modes: Sequence[str], *, count: int, repeats: int, load: float, folder: str
) -> dict[str, Any]:
    """Every mode in every repeat, each repeat beginning with another one."""
    client = Client(words_per_token(server))
    async with proxies(server, modes, folder) as places:
        began = time.perf_counter()
        rush = [Planned(0.0, one.tokens) for one in plan(_CALIBRATION, 1.0, seed=0)]
        await client.play(places[modes[0]].url, rush, seed="calibration")
        per_s = load * _CALIBRATION / (time.perf_counter() - began)
        print(f"arrivals: {per_s:.2f} a second", flush=True)
        runs = []
        for repeat in range(repeats):
            first = repeat % len(modes)
            for mode in [*modes[first:], *modes[:first]]:
                planned = plan(count, per_s, seed=repeat + 1)
                requests = await client.play(places[mode].url, planned, seed=f"repeat {repeat} {mode}")
                mean_s = sum(one["ttft_s"] for one in requests) / len(requests)
                print(f"repeat {repeat + 1}, {mode}: mean TTFT {mean_s:.2f} s", flush=True)
                runs.append({"repeat": repeat, "mode": mode, "requests": requests})
        found = {mode: await found_out(place) for mode, place in places.items()}
    return {"arrivals_per_s": per_s, "runs": runs, "engine_priority": found}


async def found_out(place: Place) -> Mapping[str, Any] | None:
    """Return the proxy's finding about the engine at the end."""
    async with httpx.AsyncClient(timeout=30) as http:
        clusters = (await http.get(f"{place.admin}/endpoints")).json()["clusters"]
    said: Mapping[str, Any] | None = clusters["default"][0]["engine_priority"]
    return said


def engine(slots: str, scheduling: str) -> Vllm:
    """One server on the first core; the other one is the proxies' and the clients'."""
    sequences, tokens = SLOTS[slots]
    values = {
        "--scheduling-policy": scheduling,
        "--max-num-seqs": sequences,
        "--max-num-batched-tokens": tokens,
        "--max-num-queued-reqs": _NO_LIMIT,
    }
    return Vllm("a", MID, core=0, further=[str(part) for pair in values.items() for part in pair])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", default="few,default", help=f"of {', '.join(SLOTS)}")
    parser.add_argument("--modes", default="off,on,auto", help="of engine_priority; others compare to the first one")
    parser.add_argument("--scheduling", default="priority", help="the engine's --scheduling-policy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=150, help="in one run")
    parser.add_argument("--load", type=float, default=0.9, help="of what the engine takes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    asked = parser.parse_args()
    if lacking := missing():
        print(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
        return 1
    modes = asked.modes.split(",")
    measured = {}
    for slots in asked.slots.split(","):
        server = engine(slots, asked.scheduling)
        print(f"{slots} slots: {SLOTS[slots]}", flush=True)
        with tempfile.TemporaryDirectory() as folder, vllm.running([server]):
            warm_up(server)
            measured[slots] = asyncio.run(
                measure(server, modes, count=asked.requests, repeats=asked.repeats, load=asked.load, folder=folder)
            )
        write(asked.out, measured, modes=modes, load=asked.load, scheduling=asked.scheduling)
    return 0


if __name__ == "__main__":
    sys.exit(main())
