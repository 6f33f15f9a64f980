"""A real vLLM takes the number in which order to admit, whatever its scheduling policy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.features.priority.support import known_of
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import warm_up
from tests.real.prompts import chat
from tests.support.proxy import running_proxy

pytestmark = pytest.mark.real

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(TINY.name, "hello"),
    "/v1/completions": {"model": TINY.name, "prompt": "hello", "max_tokens": 1},
    "/v1/messages": {"model": TINY.name, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"model": TINY.name, "input": "hello", "max_output_tokens": 1},
}


@pytest.mark.parametrize("scheduling", ["priority", "fcfs"])
async def test_all_apis_take_the_number(scheduling: str, saw: Saw) -> None:
    """Under either policy; that it is heeded shows in `python -m benchmarks.engine_priority`."""
    needs_memory(gib=4)
    server = Vllm("a", TINY, core=0, further=["--scheduling-policy", scheduling])
    saw(f"starting a vLLM server with --scheduling-policy {scheduling}")
    with vllm.running([server]):
        warm_up(server)
        async with running_proxy({"a": server.url}, policy="kv_aware", engine_priority="on") as proxy:
            for path, body in REQUESTS.items():
                answer = await proxy.client.post(path, json=body)
                assert answer.status_code == 200, answer.text
            assert known_of(proxy.proxy.clusters["default"].endpoints[0]).state.value == "unknown"  # not refused
