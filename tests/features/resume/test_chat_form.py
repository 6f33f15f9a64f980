"""Messages whose rest is requested as a chat: the request, and the events that the client gets of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.vllm import ChatForm
from kvproxy.features.other_apis.messages_chat import chat_of_messages
from kvproxy.features.other_apis.sglang_messages import sglang_chat_of_messages
from kvproxy.features.resume.chat_form import MessageOfChat
from kvproxy.features.resume.events import read_data
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.plan import Plan, Wishes, plan_leg, read_request
from kvproxy.features.resume.progress import Progress
from kvproxy.features.resume.settings import Grade
from kvproxy.features.resume.splice import Splice
from kvproxy.features.resume.typed import MessagesEvents

MESSAGE: dict[str, Any] = {
    "model": "m",
    "system": "Be short.",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 100,
    "stream": True,
    "temperature": 0,
}
FORMS = {False: chat_of_messages, True: sglang_chat_of_messages}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


def come() -> Progress:
    """Return 20 words of an answer."""
    progress = Progress()
    for number in range(20):
        progress.add(f" word{number}", None)
    return progress


def plan(forms: Mapping[bool, ChatForm] = FORMS, **fields: Any) -> Plan | str:
    """Return the plan for a message that broke behind 20 words."""
    request = read_request(RequestKind.MESSAGES, b"/v1/messages?beta=true", json.dumps({**MESSAGE, **fields}).encode())
    assert request is not None
    return plan_leg(request, come(), Wishes(Grade.TEXT, best_effort=True, chat_forms=forms))


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    """Return an event of a chat."""
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode()


def call(index: int, arguments: str, id_: str | None = None) -> dict[str, Any]:
    """Return a part of a tool call; the first one has an id."""
    named = {} if id_ is None else {"id": id_}
    name = {} if id_ is None else {"name": "look"}
    return {"index": index, **named, "function": {**name, "arguments": arguments}}


def convert(*events: bytes) -> list[dict[str, Any]]:
    """Return the data of the message's events, each of which is named after its type."""
    made = []
    for event in MessageOfChat().convert(events):
        name, data = event.decode().removesuffix("\n\n").split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def test_the_rest_is_requested_as_the_chat_that_the_engine_makes() -> None:
    """With the message's own sampling and tools."""
    planned = plan(
        tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, stop_sequences=["END"]
    )
    assert isinstance(planned, Plan)
    body = json.loads(planned.leg.body)
    assert planned.leg.target == b"/v1/chat/completions?beta=true"
    assert [one["role"] for one in body["messages"]] == ["system", "user", "assistant"]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert (body["stop"], body["temperature"], body["tool_choice"]) == (["END"], 0, "auto")
    assert body["parallel_tool_calls"] is False
    assert body["tools"][0]["function"]["name"] == "look"
    assert body["max_tokens"] == 100 - planned.place.tokens
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"forms": {}},
        {"thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
    ],
)
def test_without_a_chat_of_the_same_prompt_there_is_no_rest(fields: dict[str, Any]) -> None:
    """No feature makes chats, the template decides, or there is a picture."""
    assert plan(**fields) == "api"


def test_text_calls_and_text_are_blocks_in_turn() -> None:
    """The first text goes on in the block that is open. Text within a call comes behind it, as in vLLM's messages."""
    made = convert(
        chunk(role="assistant", content=""),
        chunk(content="and so"),
        chunk(tool_calls=[call(0, "", "call_1")]),
        chunk(tool_calls=[call(0, '{"a":')], content=" on"),
        chunk(tool_calls=[call(0, "1}")]),
        chunk("tool_calls", tool_calls=[call(1, "{}", "call_2")]),
        b'data: {"choices":[],"usage":{"completion_tokens":9}}\n\n',
        b"data: [DONE]\n\n",
    )
    assert [(one["type"], one.get("index")) for one in made] == [
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert made[2]["content_block"] == {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    assert "".join(one["delta"]["partial_json"] for one in made[3:5]) == '{"a":1}'
    assert made[7]["delta"]["text"] == " on"
    assert made[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert made[-2]["usage"] == {"output_tokens": 9}


def test_a_call_without_an_id_has_a_block() -> None:
    """Its arguments are no part of the text before it."""
    unnamed = {"index": 0, "function": {"name": "look", "arguments": "{}"}}
    made = convert(chunk(content="so"), chunk(tool_calls=[unnamed]))
    assert [(one["type"], one["index"]) for one in made[1:]] == [
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
    ]


@pytest.mark.parametrize(
    ("finish", "matched", "reason", "sequence"),
    [
        ("length", None, "max_tokens", None),
        ("stop", None, "end_turn", None),
        ("stop", 2, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("content_filter", None, "refusal", None),
    ],
)
def test_how_it_ended(finish: str, matched: object, reason: str, sequence: str | None) -> None:
    """A number is that of an end token."""
    last = b"data: %b\n\n" % json.dumps({"choices": [{"finish_reason": finish, "stop_reason": matched}]}).encode()
    made = convert(last, b"data: [DONE]\n\n")
    assert made[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize("finish", ["abort", "error", None])
def test_an_answer_that_is_not_whole_ends_with_an_error(finish: str | None) -> None:
    """Another engine may go on with it."""
    assert [one["type"] for one in convert(chunk(finish, content="and"), b"data: [DONE]\n\n")] == [
        "content_block_delta",
        "error",
    ]


def test_an_error_is_one_of_messages() -> None:
    """The client may get it, and nothing that makes half a message look whole."""
    assert convert(b'data: {"error":{"message":"dead","code":500}}\n\n', b"data: [DONE]\n\n") == [
        {"type": "error", "error": {"message": "dead", "code": 500}}
    ]


def test_a_call_instead_of_the_last_words_does_not_reach_the_client() -> None:
    """It is no part of an answer that had these words."""
    planned = plan()
    assert isinstance(planned, Plan)
    progress = come()
    splice = Splice(planned, progress, greedy=True)
    events = MessagesEvents()
    stop, *_ = MessageOfChat().convert([chunk(tool_calls=[call(0, "{}", "call_1")])])
    with pytest.raises(Mismatch):
        events.join(read_data(stop), progress, splice)


@pytest.mark.parametrize("event", [b"data: {\n\n", chunk(reasoning="Hm"), chunk(reasoning_content="Hm")])
def test_an_answer_that_does_not_go_on_is_refused(event: bytes) -> None:
    """The engine takes the rest for reasoning, or sends what is no chat."""
    with pytest.raises(Mismatch):
        MessageOfChat().convert([event])
