"""Agents and chats through kvproxy to two real vLLM servers: the tokens it predicts against those that are reused.

`python -m benchmarks.agents` starts the engines (installed by `make test-real`; they render, see `--tokenize`) and
plays each kind of client against a new `kvproxy serve` with empty caches, once by the text index alone and once with
KV events. With `--before PATH`, the checkout of an earlier version, that version takes the same turns. Writes
`reports/agents.md` and `.json`, after each run; with `--resume` what is in the latter is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agents_clients import CLIENTS, Request, Session
from benchmarks.agents_report import Report
from tests.real.agents.conftest import TEMPLATE
from tests.real.engines.place import TINY, missing
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair
from tests.support.decision import predicted_at
from tests.support.process import kvproxy_serve

AT_ONCE = 2
SOURCES = {"text index": {}, "KV events": {"kv_events": True}}


@dataclass(frozen=True)
class Shape:
    """Of the traffic of each kind."""

    sessions: int = 20
    turns: int = 8


@dataclass(frozen=True)
class Asked:
    """One request, and what became of it."""

    session: int
    turn: int  # from 1; of a sub-agent or a fork within it
    agent: str  # "" for the session's own
    endpoint: str
    source: str  # of the prediction; "" where nothing was
    predicted: int
    cached: int
    prompt: int


async def ask(http: httpx.AsyncClient, session: Session, request: Request) -> Asked:
    """Send the request and pass the answer to the session."""
    headers = {**request.headers, "x-kvproxy-debug": "1", "content-type": "application/json"}
    answer = await http.post(request.path, content=json.dumps(request.body).encode(), headers=headers)
    if answer.status_code != 200:
        raise RuntimeError(f"{request.path}: {answer.status_code} {answer.text[:500]}")
    document = answer.json()
    session.answered(request, document)
    predicted, source = predicted_at(answer.headers)
    prompt, cached = counted(document["usage"])
    predicted = min(predicted, prompt)
    endpoint = answer.headers["x-kvproxy-endpoint"]
    return Asked(session.number, request.turn, request.agent, endpoint, source, predicted, cached, prompt)


def counted(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and those reused, in whatever names the API has for them."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"] or 0
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"] or 0
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached


async def play(url: str, kind: str, shape: Shape) -> list[Asked]:
    """All sessions take turns, so many at once; each waits for its own answers."""
    waiting = deque(CLIENTS[kind](number, turns=shape.turns) for number in range(shape.sessions))
    done: list[Asked] = []

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            session = waiting.popleft()
            for request in session.next_turn():
                done.append(await ask(http, session, request))  # noqa: PERF401 - the next one needs its answer
            if not session.over:
                waiting.append(session)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http, asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client(http))
    return done


def config_file(folder: str, pair: Pair, source: str) -> str:
    """Policy, kvcache and endpoints on a free port."""
    path = Path(folder, "config.yaml")
    config = {
        "listen": "127.0.0.1:0",
        "admin": {"enabled": False},
        "endpoints": pair.urls,
        "policy": "kv_aware",
        "filters": ["inference_request", {"kvcache": SOURCES[source]} if SOURCES[source] else "kvcache", "router"],
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


async def measure(
    pair: Pair, cells: Sequence[tuple[str, str, str]], checkouts: Mapping[str, Path], report: Report, *, shape: Shape
) -> None:
    """Each kind by each source and each version."""
    for kind, source, version in cells:
        pair.forget()
        with tempfile.TemporaryDirectory() as folder:
            path = config_file(folder, pair, source)
            async with kvproxy_serve("-c", path, checkout=checkouts[version]) as proxy:
                await asyncio.sleep(2.0)  # the streams of KV events are joined
                asked = await play(proxy.url, kind, shape)
        predicted, cached = (sum(getattr(one, name) for one in asked) for name in ("predicted", "cached"))
        print(f"{kind}, {source}, {version}: {predicted} of {cached} reused tokens predicted", flush=True)
        requests = [asdict(one) for one in asked]
        report.add({"kind": kind, "source": source, "version": version, "requests": requests})


def revision(checkout: Path) -> str:
    """Of a checkout."""
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return said.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(CLIENTS))
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--before", type=Path, help="the checkout of an earlier version")
    parser.add_argument("--tokenize", action="store_true", help="engines that do not render, only /tokenize")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the last time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = parser.parse_args()
    if lacking := missing():
        print(f"not installed: {lacking}; run `make test-real`, or python -m tests.real.engines.install")
        return 1
    shape = Shape(arguments.sessions, arguments.turns)
    checkouts = {"after": Path(__file__).parent.parent}
    if arguments.before is not None:
        checkouts["before"] = arguments.before
    report = Report(
        arguments.out,
        shape=asdict(shape),
        before="" if arguments.before is None else f"*Before* is commit {revision(arguments.before)}.",
        how="which have `/tokenize` alone" if arguments.tokenize else "which render",
        resume=arguments.resume,
    )
    kinds = arguments.kinds.split(",")
    cells = [(kind, source, version) for version in checkouts for kind in kinds for source in SOURCES]
    left = [cell for cell in cells if not report.has(*cell)]
    further = ["--chat-template", str(TEMPLATE), *([] if arguments.tokenize else ["--enable-scale-out"])]
    cores = os.cpu_count() or 1
    engines = [Vllm(name, TINY, core=core % cores, blocks=8192, further=further) for core, name in enumerate("ab")]
    with running_pair(*engines) as pair:
        asyncio.run(measure(pair, left, checkouts, report, shape=shape))
    return 0


if __name__ == "__main__":
    sys.exit(main())
