"""A real vLLM told in which order to admit: under `priority` it is found to obey, under `fcfs` to ignore it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy

pytestmark = pytest.mark.real

_CLIENTS = 10
_WITHIN_S = 120.0

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(TINY.name, "hello"),
    "/v1/completions": {"model": TINY.name, "prompt": "hello", "max_tokens": 1},
    "/v1/messages": {"model": TINY.name, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"model": TINY.name, "input": "hello", "max_output_tokens": 1},
}


async def ask_until_known(proxy: RunningProxy) -> dict[str, object]:
    """Clients that keep requests waiting in the engine, until the proxy has made up its mind."""
    priority = proxy.proxy.clusters["default"].endpoints[0].priority
    number = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal number
        while priority.state.value == "unknown":
            number += 1
            prompt = text(20 + 60 * (number % 5), seed=f"priority {number}")
            body = chat(TINY.name, prompt, stream=True) | {"max_tokens": 2}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=proxy.url, timeout=60, limits=limits) as http:
        async with asyncio.timeout(_WITHIN_S):
            await asyncio.gather(*[client(http) for _ in range(_CLIENTS)])
    status = priority.status(proxy.proxy.clock())
    assert status is not None
    return status


@pytest.mark.parametrize(("scheduling", "state", "sends"), [("priority", "obeys", True), ("fcfs", "ignores", False)])
async def test_what_the_engine_makes_of_it_is_found_out(scheduling: str, state: str, sends: bool, saw: Saw) -> None:
    """One sequence at a time, so that requests wait; all four APIs take the field under either policy."""
    needs_memory(gib=4)
    flags = ["--scheduling-policy", scheduling, "--max-num-seqs", "1", "--max-num-queued-reqs", "1000"]
    server = Vllm("a", TINY, core=0, further=flags)
    saw(f"starting a vLLM server with --scheduling-policy {scheduling}")
    with vllm.running([server]):
        warm_up(server)
        async with running_proxy({"a": server.url}, policy="kv_aware", engine_priority="auto") as proxy:
            for path, body in REQUESTS.items():
                answer = await proxy.client.post(path, content=json.dumps(body), headers=_JSON)
                assert answer.status_code == 200, answer.text
            status = await ask_until_known(proxy)
            saw(f"{scheduling}: {status}")
            assert status["state"] == state
            proxy.proxy.clusters["default"].endpoints[0].load.engine = None  # whatever the last scrape saw
            assert proxy.proxy.clusters["default"].endpoints[0].priority.sends(proxy.proxy.clock()) is sends


_JSON = {"content-type": "application/json"}
