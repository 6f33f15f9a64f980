"""Token counts are found at the end of every API's answers, and nowhere else."""

from __future__ import annotations

import pytest

from kvproxy.filters.usage import Usage, read_usage

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
            b'{"response":{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},"output_tokens":2}}}',
            Usage(7, 3, 2),
        ),
        (
            b'{"usage":{"input_tokens":24,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":128}}',
            Usage(152, 128, 4),
        ),
        (b'{"usage":{"input_tokens":24,"output_tokens":4,"cache_creation_input_tokens":128}}', Usage(152, None, 4)),
    ],
)
def test_usage_of_each_api(tail: bytes, expected: Usage) -> None:
    """Chat, its stream, null details, responses; Anthropic, whose `input_tokens` counts neither hits nor writes."""
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
        b'"usage":{"prompt_tokens":"many"}',
        b'"usage":{"prompt_tokens":1' + b"0" * 40 + b"}",
        b'"usage":{"prompt_tokens":-5,"completion_tokens":1}',
        b'"usage":{"prompt_tokens":5,"completion_tokens":2147483649}',
        b'"usage":{"prompt_tokens":5.5}',
        b'"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":-1}}',
        b'"usage":{}',
        b'"usage":{"total_tokens":5}',
        b'"usage":{"prompt_tokens":5,"\xff":1,"\xffprompt_tokens":"x}',
        b'"usage":{' + b" " * 5000 + b"}",
    ],
)
def test_no_usage_is_no_error(tail: bytes) -> None:
    """Engines that do not say, truncated tails, wrong types, and objects too large to be one."""
    assert read_usage(tail) is None


def test_an_empty_usage_hides_none_before_it() -> None:
    """An echo of the request could have one."""
    assert read_usage(b"{" + CHAT + b',"metadata":{"usage":"{}"}}') == Usage(96, 64, 2)


@pytest.mark.parametrize(
    "tail",
    [
        b'"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":9}}',
        b'"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":9}}',
    ],
)
def test_no_more_is_cached_than_there_is(tail: bytes) -> None:
    """Ratios stay ratios."""
    assert read_usage(tail) == Usage(5, 5, None)


def test_the_search_for_usage_ends() -> None:
    """An answer full of what looks like one costs no more than a few hundred looks, and an object a few braces."""
    usage = b'"usage":{"prompt_tokens":5}'
    assert read_usage(usage + b'"usage":{}' * 200) == Usage(5, None, None)
    assert read_usage(usage + b'"usage":{}' * 300) is None
    assert read_usage(b'"usage":{"prompt_tokens":5,"x":[' + b"{}," * 100 + b"1]}") is None
