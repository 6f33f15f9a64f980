"""A real SGLang behind kvproxy: found out, followed, predicted, and what it says of itself is understood."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.feedback.trust import LossReason
from tests.operate.doctor.setup import visit
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import sglang
from tests.real.engines.place import TINY
from tests.real.engines.sglang import PAGE_TOKENS, Sglang
from tests.real.kvcache import Asked, ask, following
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.agents import HEADER, MARK
from tests.support.decision import predicted_at
from tests.support.proxy import running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

A = EndpointId("a")
PAGES = 1024
TURNS = 5


@pytest.fixture(scope="module")
def server(saw: Saw) -> Iterator[Sglang]:
    needs_memory(gib=4)
    one = Sglang("one", TINY, pages=PAGES, further=["--enable-priority-scheduling"])
    saw("starting an SGLang server")
    with sglang.running([one]):
        warm_up(one)
        yield one


async def test_the_doctor_finds_nothing_to_say(server: Sglang) -> None:
    """Of a server with all its flags, and of a proxy that uses them: its health path is the one that generates nothing,
    its order of admission the server's, and browsers may ask both."""
    raw: dict[str, Any] = {
        "endpoints": {"a": server.url},
        "health": {"path": "/ready"},
        "policy": "kv_aware",
        "engine_priority": "auto",
        "engine_priority_order": "highest_first",
        "filters": [
            "request_id",
            {"cors": {"allow_origins": ["*"]}},
            "inference_request",
            {"kvcache": {"kv_events": True}},
            "router",
        ],
    }
    report = await visit(raw)
    assert [str(one) for one in report.findings if one.severity != "ok"] == []


def body_of(path: str, turn: int, seed: str) -> dict[str, Any]:
    """Return a conversation's request of this API: all turns so far, and what agents put in beside."""
    said = [text(60 if number else 300, seed=(seed, number)) for number in range(turn + 1)]
    if path == "/v1/chat/completions":
        return chat(TINY.name, *[part for one in said for part in (one, "It says so.")][:-1], max_tokens=4)
    if path == "/v1/completions":
        return {"model": TINY.name, "prompt": " ".join(said), "max_tokens": 4}
    items: list[Any] = []
    for one in said:
        items += [{"role": "user", "content": one}, {"role": "assistant", "content": "It says so."}]
    if path == "/v1/responses":
        return {"model": TINY.name, "input": items[:-1], "instructions": text(300, seed=seed), "max_output_tokens": 4}
    system = [{"type": "text", "text": text(300, seed=seed), **MARK}]
    return {"model": TINY.name, "messages": items[:-1], "system": system, "max_tokens": 4}


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens that were reused, and of the prompt."""
    if "prompt_tokens" in usage:
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, usage["prompt_tokens"]
    if (details := usage.get("input_tokens_details")) is not None:
        return details["cached_tokens"], usage["input_tokens"]
    cached = usage.get("cache_read_input_tokens") or 0
    return cached, usage["input_tokens"] + cached


@pytest.mark.parametrize("events", [False, True], ids=["text index", "kv events"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_later_turns_are_predicted(server: Sglang, saw: Saw, path: str, events: bool) -> None:
    """By events each, by text in sum. A completion's prompt is one string, whose tokens are not known before."""
    later, by_tokens = [], path != "/v1/completions"
    async with following(server.url, events=events) as (proxy, service):
        index = service.overlap.indexes["default"].precise
        for turn in range(TURNS):
            rows = index.count_rows(A)
            body = body_of(path, turn, f"{path} {events}")
            answer = await proxy.client.post(path, json=body, headers={"x-kvproxy-debug": "1"}, timeout=60)
            assert answer.status_code == 200, answer.text
            cached, prompt = counted(answer.json()["usage"])
            predicted, source = predicted_at(answer.headers)
            saw(f"{path} {turn + 1}: {predicted} predicted by {source or 'nothing'}, {cached} reused of {prompt}")
            if turn:
                assert cached > 0.5 * prompt
                assert source == ("precise" if events and by_tokens else "approximate")
                assert source == "approximate" or predicted == pytest.approx(cached, abs=PAGE_TOKENS)
                later.append((predicted, cached))
            await service.actions.jobs.settled()
            if events:
                await until(lambda: index.count_rows(A) >= rows + (prompt - cached) // PAGE_TOKENS)  # noqa: B023
    predicted, cached = map(sum, zip(*later, strict=True))
    assert predicted == pytest.approx(cached, rel=0.05)


async def test_a_billing_header_is_prompt_here(server: Sglang, saw: Saw) -> None:
    """It leaves it in, so that nothing behind one that changes is reused, and nothing is predicted."""
    async with following(server.url, events=True) as (proxy, service):
        await service.scraper.scrape_all()  # which says what program it is
        for cch in ("0a1b2", "f00d5"):
            body = body_of("/v1/messages", 0, "billed")
            body["system"].insert(0, {"type": "text", "text": HEADER.format(cch)})
            answer = await proxy.client.post("/v1/messages", json=body, headers={"x-kvproxy-debug": "1"}, timeout=60)
            cached, prompt = counted(answer.json()["usage"])
            predicted, _ = predicted_at(answer.headers)
            await service.actions.jobs.settled()
        saw(f"another header: {predicted} predicted, {cached} reused of {prompt}")
        assert prompt > 600
        assert max(cached, predicted) < 100


async def test_its_metrics_are_understood(server: Sglang) -> None:
    """Which program it is, its load and capacity, and the tokens it reused, to the token of what its answers say."""
    async with following(server.url, events=False) as (proxy, service):
        [endpoint] = proxy.proxy.clusters["default"].endpoints

        async def read() -> Any:
            await service.scraper.scrape_all()
            reading = service.scraper.signals.latest_scrape(endpoint)
            assert reading is not None
            return reading[1]

        before = await read()
        assert before.kind is EngineKind.SGLANG
        assert (before.cache.capacity_tokens, before.cache.block_tokens) == (PAGES * PAGE_TOKENS, PAGE_TOKENS)
        body = chat(TINY.name, text(300, seed="metrics"), max_tokens=4)
        answers = [await ask(proxy.client, body) for _ in range(3)]
        after = await read()
        assert (after.running, after.waiting) == (0, 0)
        assert after.prefix_hits_tokens - before.prefix_hits_tokens == sum(one.cached_tokens for one in answers) > 0
        assert after.prefix_queries_tokens - before.prefix_queries_tokens == sum(one.prompt_tokens for one in answers)


@pytest.mark.parametrize("events", [True, False])
async def test_a_cache_that_is_flushed(server: Sglang, saw: Saw, events: bool) -> None:
    """By its events at once; without them eight chats that find nothing are needed."""
    async with following(server.url, events=events) as (proxy, service):
        bodies = [chat(TINY.name, text(200, seed=f"flushed {events} {number}"), max_tokens=1) for number in range(12)]
        index = service.overlap.indexes["default"].precise
        for body in bodies * 2:
            await ask(proxy.client, body)
        if events:
            await until(lambda: index.count_rows(A) > 0)
        async with httpx.AsyncClient() as http:
            (await http.post(f"{server.url}/flush_cache", timeout=30)).raise_for_status()
        if events:
            await until(lambda: index.count_rows(A) == 0, within_s=20)
        after = [await ask(proxy.client, body) for body in bodies]
        loss = service.state.losses.latest_loss("default", A)
        saw(f"predicted {[one.predicted for one in after]}, reused {[one.cached_tokens for one in after]}, {loss}")
        assert loss is not None
        assert loss.reason is (LossReason.CLEARED if events else LossReason.FORGOT)
        assert all(one.predicted < 100 for one in after[0 if events else 8 :])


async def test_its_data_parallel_ranks(saw: Saw) -> None:
    """Found out by its metrics and its events; chats stay with the rank that has them, and their later turns
    are the hits that were predicted."""
    needs_memory(gib=6)
    one = Sglang("ranks", TINY, ranks=2)
    settings = {"kv_events": True, "request_timeout": "60s"}  # a busy machine does not tokenize within 2 s
    filters = ["inference_request", {"kvcache": settings}, "router"]
    ranks = [EndpointId("a@0"), EndpointId("a@1")]
    saw("starting an SGLang server with --dp-size 2")
    with sglang.running([one]):
        warm_up(one)
        async with running_proxy({"a": one.url}, policy="kv_aware", filters=filters) as proxy:
            service = proxy.proxy.kvcache
            assert service is not None
            index = service.overlap.indexes["default"]
            await until(lambda: [each.id for each in proxy.proxy.clusters["default"].endpoints] == ranks, within_s=20)
            await until(lambda: set(index.exact) == set(ranks), within_s=20)
            sessions = [[text(330, seed=f"session {number}")] for number in range(6)]
            rows = dict.fromkeys(ranks, 0)
            asked = 0

            async def take_turn(turns: list[str]) -> Asked:
                nonlocal asked
                asked += 1
                answer = await ask(proxy.client, chat(TINY.name, *turns, max_tokens=4))
                turns += [answer.text or "nothing", text(30, seed=answer.text)]
                rows[EndpointId(answer.endpoint)] += (answer.prompt_tokens - answer.cached_tokens) // PAGE_TOKENS
                return answer

            async def settle() -> None:
                """Return once the prompts' tokens are known and their events have come."""
                await until(lambda: proxy.metric("kvproxy_kvcache_tokenizes_total", outcome="ok") == asked)
                await until(lambda: all(index.precise.count_rows(rank) >= rows[rank] for rank in ranks))
                rows.update({rank: index.precise.count_rows(rank) for rank in ranks})

            await settle()
            last = await asyncio.gather(*map(take_turn, sessions))  # at once, so that they spread
            assert {answer.endpoint for answer in last} == set(ranks)
            stayed = []
            for turn in range(2, 5):
                for number, before in enumerate(last):
                    await settle()
                    answer = last[number] = await take_turn(sessions[number])
                    if answer.endpoint == before.endpoint:
                        stayed.append(answer.cached_tokens / answer.prompt_tokens)
                        assert answer.source == "precise"
                        assert answer.predicted == pytest.approx(answer.cached_tokens, abs=PAGE_TOKENS)
                    else:  # a rank that was slow for a moment, as on a busy machine
                        saw(f"session {number} moved in turn {turn}: {answer}")
            saw(f"{len(stayed)} of 18 later turns stayed, least cached share {min(stayed):.2f}")
            assert min(stayed) > 0.7
            assert len(stayed) > 9
