"""Sampled answers go on by text only where the model was seen to continue its own answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.features.resume.proof import Proofs, find_middle
from tests.features.resume.gateway import CHAT, Gateway, chat_body, gateway
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import serve
from tests.support.proxy import running_proxy
from tests.support.until import until

ANSWER = "Rain falls when warm air rises and cools until water drops form in the clouds above."
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def count_chats(both: Gateway) -> int:
    """Return the chats that the engines got."""
    return sum(one.app.state.calls["POST /v1/chat/completions"] for one in both.engines)


async def test_a_sampled_chat_with_tools_goes_on_once_the_model_is_proven() -> None:
    """The proxy tries the model at the first stream of the route: two short chats, once."""
    body = chat_body(temperature=1, tools=[TOOL])
    async with gateway("text") as both:
        await both.ask(CHAT, body)
        await until(lambda: count_chats(both) == 3)
        await both.engines[1].faults(cut_next=1, cut_after_chunks=15)
        await both.ask(CHAT, body)
        assert both.resumed("text") == 1
        assert count_chats(both) == 5


@pytest.mark.parametrize(
    ("rest", "status", "proven"),
    [
        (ANSWER[find_middle(ANSWER) :][:20], 200, True),
        (" Rain falls when", 200, False),
        ("", 200, False),
        ("", 400, False),
    ],
)
async def test_proof_of_a_model(rest: str, status: int, proven: bool) -> None:
    """The same words, and nothing else."""

    async def behave(fake: FakeEngine, call: Call, send: Send) -> None:
        body: dict[str, Any] = json.loads(call.body)
        continues = "continue_final_message" in body
        answer = {"choices": [{"message": {"content": rest if continues else ANSWER}}]}
        await reply(send, status if continues else 200, json.dumps(answer).encode())

    async with serve(FakeEngine("a", behave)) as url, running_proxy({"a": url}) as proxy, UpstreamPool() as pool:
        endpoint = proxy.proxy.clusters["default"].endpoints[0]
        async with Proofs(pool) as proofs:
            assert not proofs.is_proven("default", "m", endpoint)
            await until(lambda: not proofs._asking)
            assert proofs.is_proven("default", "m", endpoint) is proven
