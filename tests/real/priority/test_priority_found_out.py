"""`engine_priority: auto` finds out on live traffic whether a real vLLM admits by the number."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import httpx
import pytest

from tests.features.priority.support import known_of
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import MID
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy

pytestmark = pytest.mark.real

#: More at once than the engine has slots, so that always several wait in it.
SLOTS, CLIENTS = 4, 14
#: Words of a prompt; one in three is long.
SHORT, LONG = 150, 900
#: Two minutes for a dozen pairs on a busy machine, and most engines that pay no heed need twice as many.
WITHIN_S = 480.0


async def found_out(proxy: RunningProxy) -> tuple[str, int, int]:
    """Asks until the experiment ends: what it says, after how many pairs, and how many of them were in order."""
    priority = known_of(proxy.proxy.clusters["default"].endpoints[0])
    numbers = count()

    async def keep_asking(http: httpx.AsyncClient) -> None:
        while priority.state.value == "unknown":
            number = next(numbers)
            body = chat(MID.name, text(SHORT if number % 3 else LONG, seed=f"found out {number}"), max_tokens=4)
            async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
                async for _ in answer.aiter_raw():
                    pass

    async with httpx.AsyncClient(base_url=proxy.url, timeout=300) as http, asyncio.timeout(WITHIN_S):
        await asyncio.gather(*[keep_asking(http) for _ in range(CLIENTS)])
    status: Any = priority.describe(0.0)["engine_priority"]
    return priority.state.value, int(str(status["pairs"])), int(str(status["pairs_in_order"]))


@pytest.mark.parametrize(("scheduling", "state"), [("priority", "obeys"), ("fcfs", "ignores")])
async def test_auto_finds_out_what_the_engine_does(scheduling: str, state: str, saw: Saw) -> None:
    """By pairs of requests that wait together; the engine itself tells its policy nowhere."""
    needs_memory(gib=4)
    flags = ["--scheduling-policy", scheduling, "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "1024"]
    server = Vllm("a", MID, core=0, further=flags)
    with vllm.running([server]):
        warm_up(server)
        async with running_proxy({"a": server.url}, policy="kv_aware", engine_priority="auto") as proxy:
            found, pairs, in_order = await found_out(proxy)
    saw(f"--scheduling-policy {scheduling}: {found} after {pairs} pairs, {in_order} of them in order")
    assert found == state
