"""A real vLLM with `--data-parallel-size 2`: one address, and a cache a rank."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from tests.operate.doctor.setup import visit
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

RANKS = [EndpointId("a@0"), EndpointId("a@1")]
FILTERS: list[Any] = ["request_id", "inference_request", {"kvcache": {"kv_events": True}}, "router"]


@pytest.fixture(scope="module")
def server(saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=6)
    one = Vllm("ranks", TINY, core=0, ranks=2)
    saw("starting a vLLM server with --data-parallel-size 2")
    with vllm.running([one]):
        warm_up(one)
        yield one


@contextlib.asynccontextmanager
async def proxy_of(server: Vllm, **changes: Any) -> AsyncIterator[RunningProxy]:
    """With KV events; engines' metrics are read at once."""
    endpoint = {"id": "a", "url": server.url, **changes.pop("endpoint", {})}
    config = {"policy": "kv_aware", "filters": FILTERS, **changes}
    async with running_proxy([endpoint], **config) as proxy:
        yield proxy


def members(proxy: RunningProxy) -> list[EndpointId]:
    return [endpoint.id for endpoint in proxy.proxy.clusters["default"].endpoints]


async def test_ranks_are_found_and_later_turns_find_their_prefix(server: Vllm, saw: Saw) -> None:
    """By metrics and event sources, within seconds; each chat stays with the rank that has it, by events of that rank
    alone, and every later turn is a hit."""
    async with proxy_of(server) as proxy:
        await until(lambda: members(proxy) == RANKS, within_s=20)
        kvcache = proxy.proxy.kvcache
        assert kvcache is not None
        indexes = kvcache.overlap.indexes["default"]
        await until(lambda: set(indexes.exact) == set(RANKS), within_s=20)
        hits, places = [], []
        sessions = [[text(400, seed=f"session {number}")] for number in range(6)]
        for turn in range(4):
            for number, turns in enumerate(sessions):
                turns.append(text(30, seed=f"{number} turn {turn}"))
                body = chat(TINY.name, *turns, max_tokens=4)
                answer = await proxy.client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                usage = answer.json()["usage"]
                turns.append(answer.json()["choices"][0]["message"]["content"] or "nothing")
                places.append((number, answer.headers["x-kvproxy-endpoint"]))
                if turn:
                    hits.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        rows = [indexes.precise.count_rows(rank) for rank in RANKS]
    saw(f"least cached share of a later turn {min(hits):.2f}; blocks followed at the ranks {rows}")
    assert min(hits) > 0.7
    assert len(set(places)) == 6  # each session at one place
    assert {place for _, place in places} == set(RANKS)
    assert min(rows) > 10


async def test_a_rank_that_there_is_not_costs_no_request(server: Vllm) -> None:
    """The engine's 400 is answered by asking again; then two ranks are left."""
    async with proxy_of(server, policy="round_robin", endpoint={"data_parallel": {"ranks": [0, 1, 2]}}) as proxy:
        for number in range(3):
            answer = await proxy.client.post("/v1/chat/completions", json=chat(TINY.name, f"hello {number}"))
            assert answer.status_code == 200
        assert members(proxy) == RANKS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_the_header_is_read_for_these_apis(server: Vllm, path: str) -> None:
    """One rank has the prompt that it computed, and the other has not."""
    prompt = text(200, seed=f"header {path}")
    body: dict[str, Any] = {"model": TINY.name, "max_tokens": 1}
    body |= {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    cached = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for rank in (0, 0, 1, 1):
            answer = await http.post(path, json=body, headers={"x-data-parallel-rank": str(rank)})
            usage = answer.raise_for_status().json()["usage"]
            details = usage.get("prompt_tokens_details") or {"cached_tokens": usage.get("cache_read_input_tokens")}
            cached.append(bool(details["cached_tokens"]))
    assert cached == [False, True, False, True]


async def test_responses_are_balanced_by_the_engine(server: Vllm, saw: Saw) -> None:
    """vLLM 0.32 does not look at the header there: a request for a rank that there is not is answered."""
    body = {"model": TINY.name, "input": "hello", "max_output_tokens": 1}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        answer = await http.post("/v1/responses", json=body, headers={"x-data-parallel-rank": "7"})
    saw(f"/v1/responses with a wrong rank: {answer.status_code}")
    assert answer.status_code == 200


async def test_the_doctor_asks_for_a_wrong_rank(server: Vllm) -> None:
    """And for each right one; a rank that there is not is a problem."""
    raw = {"endpoints": [{"id": "a", "url": server.url}], "filters": FILTERS}
    report = await visit(raw)
    assert [one for one in report.findings if one.check == "data-parallel ranks"] == []
    assert "data-parallel ranks" in {one.check for one in report.passed}
    raw["endpoints"][0]["data_parallel"] = {"ranks": [0, 1, 2]}
    found = [one for one in (await visit(raw)).findings if one.check == "data-parallel ranks"]
    assert len(found) == 1
    assert "2" in found[0].what
