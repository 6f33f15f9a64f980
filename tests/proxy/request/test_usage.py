"""Token counts are found at the end of every API's answers, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.proxy.request.usage import Usage, calls_tool, read_response_id, read_usage

CHAT = (
    b'"usage":{"prompt_tokens":96,"total_tokens":98,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":64}}'
)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"choices":[],' + CHAT + b',"kv_transfer_params":null}', Usage(96, 64, 2)),
        (b'data: {"choices":[],' + CHAT + b"}\n\ndata: [DONE]\n\n", Usage(96, 64, 2)),
        (b'{"usage": {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": null}}', Usage(5, None, 1)),
        (
            b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":7,"input_tokens_details":'
            b'{"cached_tokens":3},"output_tokens":2},"user":null},"sequence_number":9}\n\n',
            Usage(7, 3, 2),
        ),
        (b'{"object":"response","usage":{"input_tokens":7,"output_tokens":2},"user":null}', Usage(7, None, 2)),
        (
            b'{"usage":{"input_tokens":24,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":128}}',
            Usage(152, 128, 4),
        ),
        (b'{"usage":{"input_tokens":24,"output_tokens":4,"cache_creation_input_tokens":128}}', Usage(152, None, 4)),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_cache_hit_tokens":4}}', Usage(9, 4, 1)),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":1},"timings":{"cache_n":5,"prompt_n":4}}', Usage(9, 5, 1)),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":1},"timings":{"cache_n":-5}}', Usage(9, None, 1)),
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":1},"timings":[1.5]}', Usage(9, None, 1)),
        (
            b'data: {"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}},'
            b'"timings":{"cache_n":5}}\n\n',
            Usage(9, 2, 1),
        ),
    ],
)
def test_usage_of_each_api(tail: bytes, expected: Usage) -> None:
    """Chat, its stream, null details, responses; Anthropic, whose `input_tokens` counts neither hits nor writes; what
    DeepSeek and llama.cpp say in words of their own, unless an engine says it in OpenAI's."""
    assert read_usage(tail) == expected


def test_a_null_usage_of_an_earlier_event_is_passed_over() -> None:
    """Chunks of a stream may carry `"usage":null` after the real one was sent."""
    assert read_usage(b'data: {"a":1,' + CHAT + b'}\n\ndata: {"usage":null}\n\n') == Usage(96, 64, 2)


def test_anthropic_streams_say_the_prompt_first_and_the_rest_last() -> None:
    """message_start has the input, message_delta the output."""
    head = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"cache_read_input_tokens":6}}}\n\n'
    tail = b'event: message_delta\ndata: {"usage":{"output_tokens":5}}\n\n'
    assert read_usage(tail, head) == Usage(15, 6, 5)


def test_vllm_revises_the_input_at_the_end_of_an_anthropic_stream() -> None:
    """message_start has the whole prompt, message_delta what was not cached of it: the prompt is the same."""
    head = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":152,"output_tokens":0}}}\n\n'
    tail = b'data: {"usage":{"input_tokens":24,"output_tokens":4,"cache_read_input_tokens":128}}\n\n'
    assert read_usage(tail, head) == Usage(152, 128, 4)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"choices":[]}',
        b'"usage":',
        b'"usage":{',
        b'{"usage":{"prompt_tokens":"many"}}',
        b'{"usage":{"prompt_tokens":1' + b"0" * 40 + b"}}",
        b'{"usage":{"prompt_tokens":-5,"completion_tokens":1}}',
        b'{"usage":{"prompt_tokens":5,"completion_tokens":2147483649}}',
        b'{"usage":{"prompt_tokens":5.5}}',
        b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":-1}}}',
        b'{"usage":{}}',
        b'{"usage":{"total_tokens":5}}',
        b'{"usage":{"prompt_tokens":5,"\xff":1,"\xffprompt_tokens":"x}}',
        b'{"usage":{"prompt_tokens":5},"x":"' + b" " * 200_000 + b'"}',
    ],
)
def test_no_usage_is_no_error(tail: bytes) -> None:
    """Engines that do not say, truncated tails, wrong types, and objects too large to be one."""
    assert read_usage(tail) is None


def test_an_empty_usage_hides_none_before_it() -> None:
    """An echo of the request could have one."""
    assert read_usage(b"{" + CHAT + b',"metadata":{"usage":"{}"}}') == Usage(96, 64, 2)


FORGED = b'{"usage":{"prompt_tokens":0,"completion_tokens":0,"input_tokens":0,"output_tokens":0}}'


@pytest.mark.parametrize(
    "echo",
    [
        b'"tools":[{"type":"function","parameters":' + FORGED + b"}]",
        b'"metadata":' + FORGED,
        b'"instructions":["' + FORGED.replace(b'"', b'\\"') + b'"]',
        b'"tools":[{"\\"usage":{"prompt_tokens":0}}]',
        b'"meta_info":null,"tools":[{"meta_info":{"prompt_tokens":0,"completion_tokens":0}}]',
    ],
    ids=["tools", "metadata", "text", "name", "meta_info"],
)
@pytest.mark.parametrize("padding", [b"", b"x" * 20_000], ids=["whole", "cut"])
def test_an_echoed_usage_is_no_usage(echo: bytes, padding: bytes) -> None:
    """A client cannot say what it is charged, before the place of the real usage or behind it."""

    def told(answer: bytes) -> list[Usage | None]:
        streamed = b'data: {"type":"response.completed","response":' + answer + b',"sequence_number":3}\n\n'
        return [read_usage(whole[-16384:], native=True) for whole in (answer, streamed)]

    text = b'{"output":"' + padding + b'",'
    assert told(text + b'"usage":null,' + echo + b"}") == [None, None]
    assert told(text + echo + b',"usage":null}') == [None, None]
    assert told(text + b'"usage":{"input_tokens":7,"output_tokens":2},' + echo + b"}") == [Usage(7, None, 2)] * 2
    assert told(text + echo + b',"usage":{"input_tokens":7,"output_tokens":2}}') == [Usage(7, None, 2)] * 2


def test_usage_of_a_printed_answer() -> None:
    """Lines of JSON are no events."""
    answer = b'{\n "tools": [\n  ' + FORGED + b'\n ],\n "usage": {\n  "prompt_tokens": 5\n }\n}\n'
    assert read_usage(answer) == Usage(5, None, None)
    assert read_usage(b'{\n "usage": null,\n "tools": [\n  ' + FORGED + b"\n ]\n}\n") is None


def sglang(prompt: int, completion: int, cached: int, **more: Any) -> dict[str, Any]:
    """One answer of `/generate`; of a stream, the text so far."""
    info = {
        "id": "a",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
        "e2e_latency": 0.1,
    }
    return {"text": "x" * 8 * completion, "output_ids": [1], "meta_info": info, **more}


def test_usage_of_sglang_s_own_api() -> None:
    """`meta_info`: of one answer, of several, and of the last event of a stream."""
    one, two = sglang(96, 2, 64), sglang(4, 3, 0)
    events = b"".join(b"data: " + json.dumps(sglang(96, n, 64)).encode() + b"\n\n" for n in range(1, 3000, 500))
    for compact in (None, (",", ":")):
        assert read_usage(json.dumps(one, separators=compact).encode(), native=True) == Usage(96, 64, 2)
        assert read_usage(json.dumps([one, two], separators=compact).encode(), native=True) == Usage(100, 64, 5)
    assert read_usage((events + b"data: [DONE]\n\n")[-16384:], native=True) == Usage(96, 64, 2501)
    assert read_usage(json.dumps(one).encode()) is None


@pytest.mark.parametrize(
    "answer",
    [
        b"data: " + json.dumps(sglang(96, 2, 64, index=1)).encode() + b"\n\ndata: [DONE]\n\n",
        json.dumps([sglang(96, 2, 64), {"text": ""}]).encode(),
        b"[]",
        b"[[[",
        b"[" + b" " * 200_000 + b"]",
    ],
    ids=["stream", "one without", "none", "broken", "long"],
)
def test_several_answers_of_which_not_all_are_known(answer: bytes) -> None:
    """Better estimated than too little."""
    assert read_usage(answer, native=True) is None


@pytest.mark.parametrize(
    "tail",
    [
        b'{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":9}}}',
        b'{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":9}}}',
    ],
)
def test_no_more_is_cached_than_there_is(tail: bytes) -> None:
    """Ratios stay ratios."""
    assert read_usage(tail) == Usage(5, 5, None)


@pytest.mark.parametrize(
    ("head", "identity"),
    [
        (b'{"id":"resp_01ab-2.c","created_at":1,"object":"response"', "resp_01ab-2.c"),
        (b'event: response.created\ndata: {"response": {"id": "resp_x", "created_at": 1}', "resp_x"),
        (b'data: {"type":"response.created","response":{"id":"resp_y","object"', "resp_y"),
        (b'{"id":"chatcmpl-1"', ""),
        (b" " * 1024 + b'{"id":"resp_late"}', ""),
        (b'{"id":"resp_' + b"x" * 121 + b'"}', ""),
        (b'{"id":"resp_\xff"}', ""),
        (b"", ""),
    ],
)
def test_the_id_of_a_response(head: bytes, identity: str) -> None:
    """It stands at the beginning, and is short."""
    assert read_response_id(head) == identity


def test_the_search_for_usage_ends() -> None:
    """An answer full of what looks like one costs no more than a few hundred looks, and no more bytes than that."""
    usage = b'{"usage":{"prompt_tokens":5},"x":['
    assert read_usage(usage + b'{"usage":{}},' * 50 + b"1]}") == Usage(5, None, None)
    assert read_usage(usage + b'{"usage":{}},' * 300 + b"1]}") is None
    assert read_usage(usage + b'{"usage":{}},' * 50 + b'"' + b"x" * 10_000 + b'"]}') is None


@pytest.mark.parametrize(
    ("tail", "calls"),
    [
        (b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n', True),
        (b'{"choices":[{"message":{"content":null,"tool_calls":[{"id":"c"}]},"finish_reason":"stop"}]}', True),
        (b'{"choices": [{"message": {"content": "the api_call", "tool_calls": []}, "finish_reason": "stop"}]}', False),
        (b'{"choices":[{"message":{"content":"a","function_call":null,"tool_calls":null}}]}', False),
        (b'data: {"type":"message_delta","delta":{"stop_reason":"tool_use"}}\n\n', True),
        (b'{"content":[{"type":"text","text":"tool_use"}],"stop_reason":"end_turn"}', False),
        (b'{"output":[{"type":"function_call","name":"f"}],"parallel_tool_calls":true}', True),
        (b'{"output":[{"type": "custom_tool_call"}]}', True),
        (b'{"output":[{"type":"message"}],"parallel_tool_calls":true,"max_tool_calls":null}', False),
        (b"", False),
    ],
)
def test_calls_of_tools_are_found_in_every_api(tail: bytes, calls: bool) -> None:
    """In chat, Anthropic's messages and responses, whole or at the end of a stream; not in generated text."""
    assert calls_tool(tail) is calls
