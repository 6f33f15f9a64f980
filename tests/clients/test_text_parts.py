"""count_text_parts: tokens are asked for up to the first message that is not of text alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.clients.text_parts import count_text_parts, with_leading_parts
from kvproxy.json_scan import Unreadable, run_at_once
from kvproxy.types import RequestKind

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
