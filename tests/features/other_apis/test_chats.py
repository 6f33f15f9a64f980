"""chat_of_messages and chat_of_responses: the chat has the prompt that an engine makes of the request itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given

from kvproxy.cache.clients.chat_body import tokenize_body
from kvproxy.features.other_apis.messages_chat import chat_of_messages
from kvproxy.features.other_apis.responses_chat import chat_of_responses
from kvproxy.features.other_apis.sglang_messages import sglang_chat_of_messages
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.sglang_requests import messages_as_chat
from kvproxy.lab.simulator.tokenizer import Tokenizer
from tests.support.agents import messages_bodies, responses_bodies

PROMPTS = Prompts(Tokenizer())
HEADER = "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"


def raw(body: Any) -> bytes:
    return json.dumps(body).encode()


@given(messages_bodies())
def test_messages_have_the_tokens_of_their_chat(body: dict[str, Any]) -> None:
    """The tokens of `/tokenize` for the chat are those that the engine computes."""
    asked = json.loads(tokenize_body("", chat_of_messages(raw(body))))
    assert PROMPTS.encode_tokenize(asked) == PROMPTS.encode_anthropic(body)


@given(messages_bodies())
def test_sglang_has_a_chat_of_its_own(body: dict[str, Any]) -> None:
    """With other places for headers, empty texts and results; thoughts are left to its template."""
    try:
        chat = sglang_chat_of_messages(raw(body))
    except ValueError:
        assume(False)
    prompts = Prompts(Tokenizer(), drops_header=False)
    assert prompts.encode_tokenize(json.loads(tokenize_body("", chat))) == prompts.encode_chat(messages_as_chat(body))


@given(responses_bodies())
def test_responses_have_the_tokens_of_their_chat(body: dict[str, Any]) -> None:
    """The same for a response whose history is in the request."""
    asked = json.loads(tokenize_body("", chat_of_responses(raw(body))))
    assert PROMPTS.encode_tokenize(asked) == PROMPTS.encode_responses(body)


def test_a_turn_with_tools_as_a_chat() -> None:
    """Thoughts, calls and results in the places where a chat has them; headers and marks are gone."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "system": [
            {"type": "text", "text": HEADER},
            {"type": "text", "text": "You are."},
            {"type": "text", "text": "!"},
        ],
        "tools": [{"name": "f", "input_schema": {"properties": {}}, **mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1, 2.0]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}] * 2},
                    {"type": "tool_result", "tool_use_id": "t2"},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        "thinking": {"type": "disabled"},
        "max_tokens": 9,
    }
    function = {"name": "f", "description": None, "parameters": {"properties": {}, "type": "object"}}
    assert json.loads(chat_of_messages(raw(body))) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are.!"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning": "Hm",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2.0]}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "x\nx"},
            {"role": "tool", "tool_call_id": "t2", "content": ""},
            {"role": "user", "content": "and?"},
        ],
        "tools": [{"type": "function", "function": {**function, "strict": None, "defer_loading": None}}],
        "reasoning_effort": "none",
    }


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ('{"a" : [1,  2]}', '{"a" : [1,  2],"type":"object"}'),
        ("{ }", '{"type":"object"}'),
        ('{"x": {"type": 1}}', '{"x": {"type": 1},"type":"object"}'),
        ('{"type" : "array", "a":1}', '{"type" : "array", "a":1}'),
        ('{"t\\u0079pe": null}', '{"t\\u0079pe": null}'),
    ],
)
def test_a_tools_schema_is_copied_as_it_is(schema: str, shown: str) -> None:
    """As many members as a client likes are not taken apart: that alone would hold the event loop. What says no type
    is an object."""
    body = b'{"messages": [], "tools": [{"name": "f", "input_schema": %b}]}' % schema.encode()
    assert f'"parameters":{shown},'.encode() in chat_of_messages(body)


def test_items_of_one_assistant_are_one_message() -> None:
    """Thought, answer and calls that follow each other; of several parts of an answer the first."""
    items = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "short"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}] * 2},
        {"type": "function_call", "call_id": "1", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "***"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": "B"},
        {"role": "assistant", "content": "C"},
    ]
    calls = [("1", "n__f", "{}"), ("2", "patch", '{"input":"***"}')]
    assert json.loads(chat_of_responses(raw({"input": items})))["messages"] == [
        {
            "role": "assistant",
            "reasoning": "short",
            "content": "A",
            "tool_calls": [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id_, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "B"},
        {"role": "assistant", "content": "C"},
    ]


def test_of_a_responses_tools_a_model_sees_the_functions() -> None:
    """Those of a namespace under one name, free text as a function, what the engine runs itself not at all."""
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    tools = [
        {"type": "namespace", "name": "n", "tools": [function, {"type": "custom", "name": "x"}]},
        {"type": "custom", "name": "patch", "description": "D"},
        {"type": "web_search"},
    ]
    shown = json.loads(chat_of_responses(raw({"input": "Hi", "tools": tools})))["tools"]
    assert [tool["function"]["name"] for tool in shown] == ["n__f", "patch"]
    assert shown[0]["function"]["strict"] is True
    assert list(shown[1]["function"]["parameters"]["properties"]) == ["input"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "a reminder"}],
        [{"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}]}],
        [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t", "content": []}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}],
        [{"role": "user", "content": 5}],
        {},
    ],
    ids=["image", "image of a tool", "later system", "changed tools", "own result", "no id", "no text", "no list"],
)
def test_messages_that_no_chat_can_say_are_refused(messages: Any) -> None:
    """No tokens are better than wrong ones."""
    with pytest.raises(ValueError, match=r".+"):
        chat_of_messages(raw({"messages": messages}))


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi", "previous_response_id": "resp_1"},
        {"input": "Hi", "conversation": {"id": "c"}},
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        {"input": [{"type": "reasoning", "content": "x"}]},
        {"input": [{"type": "image_generation_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
        {"input": [{"role": "assistant", "content": []}]},
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}]},
        {"input": [{"role": "assistant", "content": "A", "status": "in_progress"}]},
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": HEADER + "\nYou"}]}]},
        {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]},
        {"input": [{"type": "function_call", "arguments": "{}", "name": "f"}]},
        {"input": [5]},
        {},
    ],
    ids=str,
)
def test_responses_that_no_chat_can_say_are_refused(body: dict[str, Any]) -> None:
    """Only the engine has the content, or renders it by other rules."""
    with pytest.raises(ValueError, match=r".+"):
        chat_of_responses(raw(body))


@pytest.mark.parametrize("schema", ["5", "[]", "null", '"type"'])
def test_a_schema_that_is_no_object_is_refused(schema: str) -> None:
    """As by the engine."""
    with pytest.raises(ValueError, match="not a request"):
        chat_of_messages(b'{"messages": [], "tools": [{"name": "f", "input_schema": %b}]}' % schema.encode())


def test_null_is_nothing() -> None:
    """As for the engine."""
    body = {"input": "Hi", "previous_response_id": None, "tools": None, "reasoning": None, "instructions": None}
    assert json.loads(chat_of_responses(raw(body))) == {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"messages": [{"role": "system", "content": "S"}], "system": None, "tools": None, "thinking": None}
    assert json.loads(chat_of_messages(raw(body))) == {"messages": [{"role": "system", "content": "S"}]}


def test_differences_of_sglang() -> None:
    """Blocks of a system prompt are lines, a header one of them; what a user says stays before the results it is
    before; results of several texts stay apart."""
    body = {
        "model": "m",
        "system": [{"type": "text", "text": HEADER}, {"type": "text", "text": "You are."}],
        "tools": [{"name": "f", "input_schema": {}}],
        "output_config": {"effort": "xhigh"},
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "First:"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": t} for t in "ab"],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
            {"role": "assistant", "content": []},
        ],
    }
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    function = {"name": "f", "description": "", "parameters": {"type": "object"}, "strict": False}
    assert json.loads(sglang_chat_of_messages(raw(body))) == {
        "model": "m",
        "reasoning_effort": "max",
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "system", "content": f"{HEADER}\nYou are."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "user", "content": "First:"},
            {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": t} for t in "ab"]},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": ""},
        ],
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "system", "content": "later"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "enabled"}},
        {"messages": 1},
    ],
)
def test_inputs_decided_by_sglangs_template_are_refused(fields: dict[str, Any]) -> None:
    """No tokens are better than wrong ones."""
    with pytest.raises(ValueError, match=r"template's business|the template decides|a block of type|not a request"):
        sglang_chat_of_messages(raw(fields))
