"""Parts of a chat request that reach `/tokenize`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.base.json_scan import Unreadable, run_at_once
from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.chat_body import count_text_parts, render_body, tokenize_body, with_leading_parts

MESSAGES = [{"role": "user", "content": "Hällo  "}]


def tokenized(body: dict[str, Any], *, model: str = "") -> dict[str, Any]:
    result: dict[str, Any] = json.loads(tokenize_body(model, json.dumps(body).encode()))
    return result


def test_only_what_shapes_the_prompt_is_sent() -> None:
    """Sampling parameters, streaming and stray fields stay away."""
    body = {"model": "m", "messages": MESSAGES, "stream": True, "temperature": 1, "prompt": "x", "tools": [{"a": 1}]}
    assert tokenized(body) == {"model": "m", "messages": MESSAGES, "tools": [{"a": 1}]}


def test_parts_keep_their_very_bytes() -> None:
    """Nothing is re-serialised: escapes and spacing of the client arrive as they are."""
    raw = b'{"messages":[ {"role":"user","content":"h\\u00e4 \\/"} ],"add_generation_prompt": false}'
    assert b'[ {"role":"user","content":"h\\u00e4 \\/"} ]' in tokenize_body("", raw)


def test_an_alias_is_replaced() -> None:
    """The engine must see the name it knows."""
    assert tokenized({"model": "alias", "messages": MESSAGES}, model="real")["model"] == "real"
    assert "model" not in tokenized({"messages": MESSAGES})


@pytest.mark.parametrize(("effort", "thinks"), [("high", True), ("none", False)])
def test_reasoning_effort_goes_into_the_template(effort: str, thinks: bool) -> None:
    """The chat endpoint does so by itself and derives enable_thinking from it; `/tokenize` does not."""
    kwargs = tokenized({"messages": MESSAGES, "reasoning_effort": effort})["chat_template_kwargs"]
    assert kwargs == {"reasoning_effort": effort, "enable_thinking": thinks}


def test_given_template_kwargs_are_completed_as_the_engine_does() -> None:
    """The request's own fields win; an explicit enable_thinking stays."""
    body = {
        "messages": MESSAGES,
        "reasoning_effort": "low",
        "documents": [{"text": "d"}],
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high", "x": 1},
    }
    assert tokenized(body)["chat_template_kwargs"] == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "documents": [{"text": "d"}],
        "x": 1,
    }


def test_null_means_not_given() -> None:
    """As the engine reads it."""
    body = {"messages": MESSAGES, "reasoning_effort": None, "documents": None, "chat_template_kwargs": None}
    assert tokenized(body)["chat_template_kwargs"] is None
    assert tokenized({**body, "documents": []})["chat_template_kwargs"] == {"documents": []}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":"m"}', b'{"messages":', b"[" * 100_000])
def test_bodies_other_than_chats_are_refused(body: bytes) -> None:
    """Before anything is sent."""
    with pytest.raises(ValueError, match="not a"):
        tokenize_body("m", body)


def test_render_takes_the_body_as_it_is() -> None:
    """Every field may shape the prompt there; only an alias changes."""
    raw = b'{"model": "alias", "messages": [], "stream": true}'
    assert render_body("", raw) is raw
    assert json.loads(render_body("real", raw)) == {"model": "real", "messages": [], "stream": True}


TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def count(*messages: Any) -> int:
    return count_text_parts([json.dumps(message).encode() for message in messages])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": [TEXT, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT]}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": None},
        "a whole input",
    ],
    ids=str,
)
def test_text(message: Any) -> None:
    """In whatever shape an API has it."""
    assert count(message) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [TEXT, IMAGE]},
        {"role": "user", "content": [{"type": "image", "source": {}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
        {"type": "image_generation_call"},
        {"role": "user", "content": ["a", "b"]},
        5,
    ],
    ids=str,
)
def test_not_text(message: Any) -> None:
    """Or nothing that can be read: what comes after it is not asked for either."""
    assert count({"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}) == 1


def test_lists_in_lists_are_not_followed() -> None:
    """A part may hold parts once; deeper ones are no text, however many there are."""
    nested: Any = [TEXT]
    for _ in range(3):
        nested = [{"type": "tool_result", "content": nested}]
    assert count({"role": "user", "content": nested}) == 0


@pytest.mark.parametrize(("kind", "name"), [(RequestKind.MESSAGES, "messages"), (RequestKind.RESPONSES, "input")])
def test_a_body_with_the_leading_messages(kind: RequestKind, name: str) -> None:
    """All else stays as it was sent; of a name that is there twice the last one counts, as for any parser."""
    body = b'{"model":"m", "%b":[1], "%b" : [{"role":"user"}, 2 ,3],"tools":[]}' % (name.encode(), name.encode())
    cut = run_at_once(with_leading_parts(kind, body, [b'{"role":"user"}', b"2"]))
    assert cut == body.replace(b'[{"role":"user"}, 2 ,3]', b'[{"role":"user"},2]')
    with pytest.raises(Unreadable):
        run_at_once(with_leading_parts(kind, b"{}", [b"2"]))
