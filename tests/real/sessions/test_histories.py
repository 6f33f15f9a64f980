"""Real vLLM servers that store responses: a request that goes on from one finds it, and what it reuses was known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.real.conftest import Saw, needs_memory
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair
from tests.real.prompts import text
from tests.support.proxy import RunningProxy, running_proxy

pytestmark = pytest.mark.real

TURNS = 5
BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def engines(saw: Saw) -> Iterator[Pair]:
    needs_memory(gib=6)
    saw("starting two vLLM servers that store responses")
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with running_pair(*(Vllm(name, TINY, core=core, environment=stores) for core, name in enumerate("ab"))) as pair:
        yield pair


async def ask(proxy: RunningProxy, **body: Any) -> httpx.Response:
    asked = {"model": TINY.name, "max_output_tokens": 8, "temperature": 0, **body}
    return await proxy.client.post("/v1/responses", json=asked)


async def test_turn_by_turn_the_history_is_where_it_was_predicted(engines: Pair, saw: Saw) -> None:
    """Eight sessions on two engines, each turn naming the response before: none is lost, and what was predicted is
    reused."""
    async with running_proxy(engines.urls, policy="kv_aware") as proxy:
        cached = 0
        for number in range(8):
            homes, before = set(), None
            for turn in range(TURNS):
                said = text(200 if turn == 0 else 40, seed=(number, turn))
                answer = await ask(proxy, input=said, **({} if before is None else {"previous_response_id": before}))
                assert answer.status_code == 200, answer.text
                homes.add(answer.headers["x-kvproxy-endpoint"])
                before, usage = answer.json()["id"], answer.json()["usage"]
                if turn:
                    cached += usage["input_tokens_details"]["cached_tokens"]
            assert len(homes) == 1
        name, labels = "kvproxy_kvcache_predicted_tokens_total", {"cluster": "default", "source": "session"}
        predicted = sum(proxy.metric(name, endpoint=endpoint, **labels) for endpoint in "ab")
        saw(f"predicted {predicted:.0f} tokens of {8 * (TURNS - 1)} later turns, the engines reused {cached}")
        assert predicted - 8 * (TURNS - 1) * BLOCK_TOKENS <= cached <= 1.1 * predicted
        wrong = sum(
            proxy.metric("kvproxy_kvcache_predictions_total", endpoint=endpoint, result="miss", **labels)
            for endpoint in "ab"
        )
        assert wrong == 0


async def test_the_engine_that_does_not_know_it_says_404_and_the_other_one_is_asked(engines: Pair, saw: Saw) -> None:
    """vLLM keeps responses in one server's memory."""
    async with running_proxy(engines.urls, policy="round_robin", client_policies=["kv_aware"]) as proxy:
        first = await ask(proxy, input=text(100, seed="alone"))
        home, identity = first.headers["x-kvproxy-endpoint"], first.json()["id"]
        for _ in range(4):
            answer = await ask(proxy, input="and?", previous_response_id=identity)
            assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, home), answer.text
        retries = proxy.metric("kvproxy_retries_total", reason="history_elsewhere")
        saw(f"{retries:.0f} of 4 requests were answered 404 first")
        assert retries > 0
        unknown = await ask(proxy, input="and?", previous_response_id="resp_of_no_server")
        assert unknown.status_code == 404


async def test_without_the_store_a_response_cannot_be_gone_on_from(engines: Pair) -> None:
    """`store: false` is the engine's to answer; nothing is remembered of it."""
    async with running_proxy(engines.urls, policy="kv_aware") as proxy:
        first = await ask(proxy, input="hello", store=False)
        assert proxy.metric("kvproxy_kvcache_last_served", what="responses") == 0
        answer = await ask(proxy, input="and?", previous_response_id=first.json()["id"])
        assert answer.status_code == 404
