"""Data-parallel ranks of a simulated vLLM, against what a real one answered."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from tests.lab.simulator.support import FIXTURES, TINY
from tests.support.loopback import serve
from tests.support.vllms.ranks import FrontEnd, RankedSettings, RankedVllm

EXCHANGES: list[dict[str, Any]] = json.loads((FIXTURES / "data_parallel.json").read_text())["exchanges"]
GENERATIONS = [each for each in EXCHANGES if each["request"]["method"] == "POST"]
HEADER = "x-data-parallel-rank"


@contextlib.asynccontextmanager
async def ranked(**settings: Any) -> AsyncIterator[tuple[RankedVllm, httpx.AsyncClient]]:
    app = RankedVllm(RankedSettings(**{"engine": TINY, **settings}), rng=random.Random(1))
    async with app, serve(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield app, client


def samples(text: str) -> dict[str, float]:
    """Counters of an exposition, by series."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_the_same_requests_get_the_same_answers_and_move_the_same_counters() -> None:
    """A rank in the header, none, one out of range and one that is no number, each after the other."""
    async with ranked() as (_, client):
        before = samples((await client.get("/metrics")).text)
        for exchange in GENERATIONS:
            asked, expected = exchange["request"], exchange["response"]
            prompt = [token % 1000 for token in asked["body"]["prompt"]["first"] * 50]
            body = {**asked["body"], "prompt": prompt}
            answer = await client.post("/v1/completions", json=body, headers=asked.get("headers", {}))
            assert answer.status_code == expected["status"], exchange["name"]
            if answer.status_code == 400:
                assert answer.json() == expected["body"]
            else:
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == expected["body"]["usage"]["prompt_tokens_details"]["cached_tokens"], exchange["name"]
            now = samples((await client.get("/metrics")).text)
            for name, grown in exchange["metrics_delta"].items():
                assert now[name] - before[name] == grown, (exchange["name"], name)
            before = now


async def test_metrics_of_the_process_count_once() -> None:
    """Every family is described once, and samples without a rank stand there once."""
    async with ranked() as (_, client):
        text = (await client.get("/metrics")).text
    lines = text.splitlines()
    assert len(set(lines)) == len(lines)
    assert sum(line.startswith("process_start_time_seconds ") for line in lines) == 1
    assert text.count('vllm:num_requests_running{engine="') == 2
    assert text.count("# TYPE vllm:num_requests_running") == 1


async def test_every_rank_publishes_its_own_events() -> None:
    """On ports of its own, under its number in the deployment."""
    engine = replace(TINY, kv_events=PublisherSettings())
    async with ranked(engine=engine, first=4) as (app, client):
        sources = (await client.get("/kv_event_sources")).json()
        metrics = (await client.get("/metrics")).text
        await client.post("/v1/completions", json={"model": "tiny", "prompt": "x " * 200, "max_tokens": 1})
        published = {rank: one.state.publisher for rank, one in app.ranks.items()}
    assert sources.keys() == {"4", "5"}
    assert sources["4"]["endpoint"] != sources["5"]["endpoint"]
    assert 'engine="4"' in metrics
    assert 'engine="0"' not in metrics
    assert [one is not None and one.published > 0 for one in published.values()] == [True, False]


async def test_ports_that_are_given_are_those_of_the_first_rank() -> None:
    """vLLM's further ranks publish above it."""
    app = RankedVllm(RankedSettings(replace(TINY, kv_events=PublisherSettings(port=9000, replay_port=9100)), first=4))
    events = [one.state.settings.kv_events for one in app.ranks.values()]
    assert [(one.port, one.replay_port, one.rank) for one in events if one is not None] == [
        (9004, 9104, 4),
        (9005, 9105, 5),
    ]


@pytest.mark.parametrize(
    ("front_end", "number", "status", "message"),
    [
        (FrontEnd.PYTHON, 1, 200, ""),
        (FrontEnd.PYTHON, 5, 400, "data_parallel_rank 5 is out of range [0, 2)."),
        (FrontEnd.RUST, 5, 200, ""),
        (FrontEnd.RUST, 1, 400, "engine-core error"),
        (FrontEnd.RUST, -1, 400, "engine-core error"),
    ],
)
async def test_front_ends_read_a_rank_differently(front_end: FrontEnd, number: int, status: int, message: str) -> None:
    """Where a server's own ranks do not begin at 0."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
    async with ranked(first=4, front_end=front_end) as (app, client):
        answer = await client.post("/v1/completions", json=body, headers={HEADER: str(number)})
        asked = {rank: len(one.state.requests) for rank, one in app.ranks.items()}
    assert answer.status_code == status
    assert asked == ({4: 0, 5: 1} if status == 200 else {4: 0, 5: 0})
    if message:
        assert answer.json()["error"]["message"] == message


async def test_responses_are_balanced_whatever_the_header_says() -> None:
    """vLLM 0.32 does not look at it there."""
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 1}
    async with ranked() as (app, client):
        for _ in range(4):
            assert (await client.post("/v1/responses", json=body, headers={HEADER: "0"})).status_code == 200
        assert [len(one.state.requests) for one in app.ranks.values()] == [2, 2]


async def test_the_server_is_one() -> None:
    """A dead rank is a dead server; what changes caches or faults reaches all; the rest is answered once."""
    async with ranked() as (app, client):
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.post("/sim/faults", json={"engine_dead": True})).status_code == 200
        assert all(one.state.faults.values.engine_dead for one in app.ranks.values())
        assert (await client.get("/health")).status_code == 503
