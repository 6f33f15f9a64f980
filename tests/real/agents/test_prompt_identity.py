"""Prompts that kvproxy takes for one are one to a real vLLM, and those it takes for two are two: by token ids."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.clients.chat_body import tokenize_body
from kvproxy.cache.prefix.prompt_identity import prompt_identity
from kvproxy.features.other_apis.messages_chat import chat_of_messages
from kvproxy.features.other_apis.responses_chat import chat_of_responses
from kvproxy.proxy.request.parse import parse_body
from tests.real.agents.conftest import Renderer
from tests.real.conftest import Saw
from tests.real.engines.place import TINY
from tests.support.agents import HEADER, MARK, chat_bodies, messages_bodies, responses_bodies

pytestmark = pytest.mark.real

CHAT, MESSAGES, RESPONSES = RequestKind.CHAT, RequestKind.MESSAGES, RequestKind.RESPONSES
BODIES: dict[RequestKind, Callable[[], st.SearchStrategy[dict[str, Any]]]] = {
    CHAT: chat_bodies,
    MESSAGES: messages_bodies,
    RESPONSES: responses_bodies,
}
TRANSLATED = {MESSAGES: chat_of_messages, RESPONSES: chat_of_responses}
#: An engine answers in some milliseconds.
_often = settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


def named(kind: RequestKind, body: dict[str, Any]) -> Prompt:
    """Return the bytes that name its prompt."""
    request = parse_body(kind, json.dumps(body).encode())
    assert request is not None
    return prompt_identity(kind, request.prompt)


def of_model(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "model": TINY.name}


@pytest.mark.parametrize("kind", BODIES)
def test_one_identity_is_one_prompt(engine: Renderer, saw: Saw, kind: RequestKind) -> None:
    """Bodies with one identity have the same ids; random small bodies often have one."""
    seen: dict[Prompt, tuple[tuple[int, ...], dict[str, Any]]] = {}
    compared = refused = 0

    @_often
    @given(BODIES[kind]())
    def check(body: dict[str, Any]) -> None:
        nonlocal compared, refused
        ids = engine.rendered(kind, of_model(body))
        if ids is None:
            refused += 1
            return
        known, other = seen.setdefault(named(kind, body), (ids, body))
        compared += body != other
        assert engine.text(known) == engine.text(ids), (body, other)

    check()
    saw(f"{kind}: {len(seen)} identities, {compared} of them of several bodies, {refused} bodies refused")
    assert len(seen) > 10


def respelled(kind: RequestKind, body: dict[str, Any], cch: int, choose: Callable[[], bool]) -> dict[str, Any]:
    """Return the body as a client might as well have sent it: marks elsewhere, a string for a text part, another
    header."""
    body = copy.deepcopy(body)
    if kind is CHAT and body["messages"][0]["role"] == "system":
        with_header(body["messages"][0], cch)
    for block in blocks_of(kind, body):
        block.pop("cache_control", None)
        if choose():
            block.update(copy.deepcopy(MARK))
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, str) and content and choose():
            message["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and len(content) == 1 and content[0].get("text") and choose():
            message["content"] = content[0]["text"]
    body["messages"] = [dict(reversed(one.items())) if choose() else one for one in body["messages"]]
    if kind is MESSAGES and isinstance(body.get("system"), list):
        body["system"].insert(0, {"type": "text", "text": HEADER.format(cch)})
    return body


def with_header(system: dict[str, Any], cch: int) -> None:
    """Put a line in front of the text."""
    line, content = HEADER.format(cch) + "\n", system["content"]
    if isinstance(content, str):
        system["content"] = line + content
    else:
        content[0]["text"] = line + content[0]["text"]


def blocks_of(kind: RequestKind, body: dict[str, Any]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in body["messages"]]
    if kind is MESSAGES:
        contents += [body.get("system"), body.get("tools")]
    return [block for content in contents if isinstance(content, list) for block in content]


@pytest.mark.parametrize("kind", [CHAT, MESSAGES])
def test_one_prompt_however_spelled_is_one_identity(engine: Renderer, saw: Saw, kind: RequestKind) -> None:
    """Clients change these parts from turn to turn, and an engine does not see them."""
    checked = 0

    @_often
    @given(BODIES[kind](), st.data())
    def check(body: dict[str, Any], data: st.DataObject) -> None:
        nonlocal checked
        one, other = (respelled(kind, body, cch, lambda: data.draw(st.booleans())) for cch in (1, 2))
        first, second = (engine.rendered(kind, of_model(each)) for each in (one, other))
        assert engine.text(first) == engine.text(second)
        if first is not None and not is_left_as_sent(kind, body):
            checked += 1
            assert named(kind, one) == named(kind, other)

    check()
    saw(f"{kind}: {checked} pairs of one prompt")
    assert checked > 15


def is_left_as_sent(kind: RequestKind, body: dict[str, Any]) -> bool:
    """Return True for bodies beyond the rules: empty texts, a system of only headers, the name inside of an input."""
    texts = [block.get("text") for block in blocks_of(kind, body)]
    if "" in texts or any(message["content"] == "" for message in body["messages"]):
        return True
    if any("cache_control" in json.dumps(given) for given in inputs_of(body)):
        return True
    system = body.get("system") if kind is MESSAGES else body["messages"][0]["content"]
    blocks = [system] if isinstance(system, str) else [block["text"] for block in system or () if "text" in block]
    return not [text for text in blocks if not text.startswith(HEADER[:20])]


def inputs_of(body: dict[str, Any]) -> list[Any]:
    blocks = [
        block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]
    ]
    given = [block.get("input") for block in blocks] + [block.get("content") for block in blocks]
    return [*given, *(tool.get("input_schema") or tool.get("function") for tool in body.get("tools") or ())]


@pytest.mark.parametrize("kind", TRANSLATED)
def test_the_chat_has_the_ids_of_the_request(engine: Renderer, saw: Saw, kind: RequestKind) -> None:
    """An engine that does not render is sent this instead."""
    equal = refused = 0

    @_often
    @given(BODIES[kind]())
    def check(body: dict[str, Any]) -> None:
        nonlocal equal, refused
        raw = json.dumps(of_model(body)).encode()
        ids = engine.rendered(kind, raw)
        if ids is None:
            refused += 1
            return
        told = engine.tokenized(tokenize_body("", TRANSLATED[kind](raw)))
        assert engine.text(told) == engine.text(ids)
        assert told == ids
        equal += 1

    check()
    saw(f"{kind}: {equal} prompts, equal; {refused} refused by the engine")
    assert equal > 50
