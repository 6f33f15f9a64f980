"""A coding agent's turns through a whole proxy: what its engine reuses is predicted, and what it sent goes upstream."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.proxy.listener.server import serve
from tests.cache.fleet import simulated
from tests.cache.support import long_text
from tests.support.proxy import running_proxy

TURNS = 8
MARK = {"cache_control": {"type": "ephemeral"}}
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={:05x};"


class Recorder:
    """Keeps the bodies that reach an engine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[bytes] = []

        async def heard() -> Message:
            message = await receive()
            pieces.append(message.get("body", b""))
            return message

        await self._app(scope, heard, send)
        if scope["type"] == "http" and scope["method"] == "POST":
            self.bodies.append(b"".join(pieces))


def agent_body(turn: int) -> dict[str, Any]:
    """As Claude Code sends it: another header each time, marks on the last two messages of the user, four tools."""
    tools = [
        {"name": f"tool_{number}", "description": long_text(f"d{number}", 40), "input_schema": {"type": "object"}}
        for number in range(4)
    ]
    messages: list[dict[str, Any]] = []
    for number in range(2 * turn + 1):
        block = {"type": "text", "text": long_text(f"said{number}", 60)}
        messages.append({"role": ("user", "assistant")[number % 2], "content": [block]})
    for message in messages[-1::-2][:2]:
        message["content"][-1].update(MARK)
    for message in messages[-5::-2]:
        message["content"] = message["content"][0]["text"]  # where no mark is, a string will do
    system = [
        {"type": "text", "text": HEADER.format(turn * 7919)},
        {"type": "text", "text": long_text("system", 200), **MARK},
    ]
    tools[-1].update(MARK)
    return {"model": "tiny", "max_tokens": 4, "system": system, "tools": tools, "messages": messages}


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the same as a gateway translates it: the header is the first line of the system message."""
    system = {"role": "system", "content": "\n".join(block["text"] for block in body["system"])}
    tools = [
        {"type": "function", "function": {"name": tool["name"], "description": tool["description"]}}
        for tool in body["tools"]
    ]
    return {"model": "tiny", "max_tokens": 4, "messages": [system, *body["messages"]], "tools": tools}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_each_turn_of_an_agent_finds_its_last_one(path: str) -> None:
    """The prefix that is predicted covers the last turn's prompt, as what the engine reuses does."""
    sent, before = [], 0
    async with simulated(names=("a",)) as place:
        recorder = Recorder(place.fleet.engines["a"])
        async with (
            serve(recorder, drain_s=0.01, cut_grace_s=0.01) as engine,
            running_proxy(
                {"a": engine}, policy="kv_aware", filters=["inference_request", "kvcache", "router"]
            ) as proxy,
        ):
            for turn in range(TURNS):
                body = agent_body(turn) if path == "/v1/messages" else as_chat(agent_body(turn))
                sent.append(json.dumps(body).encode())
                headers = {"content-type": "application/json", "x-kvproxy-debug": "1"}
                answer = await proxy.client.post(path, content=sent[-1], headers=headers)
                assert answer.status_code == 200
                usage = answer.json()["usage"]
                decision = answer.headers["x-kvproxy-decision"]
                matched = re.search(r"matched=a:(\d+)/approximate", decision)
                predicted = int(matched[1]) if matched else 0
                if path == "/v1/messages":
                    reused = usage["cache_read_input_tokens"]
                    prompt = sum(usage[name] for name in usage if name.endswith("input_tokens"))
                else:
                    reused, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
                if turn:
                    assert reused > 0.95 * before
                    assert predicted == pytest.approx(before, rel=0.08)  # bytes a token are learned slowly
                before = prompt
    assert [body for body in recorder.bodies if body in sent] == sent
