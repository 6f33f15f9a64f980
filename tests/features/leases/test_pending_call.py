"""Whether an answer waits for a tool, and how long its client wants the prompt to be kept."""

from __future__ import annotations

import json

import pytest

from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.prefix.cache_marks import read_ttl_s
from kvproxy.features.leases.leases import ToolCallDetector
from kvproxy.proxy.request.parse import parse_body

CHAT_STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"tool_calls":[{"id":"c1","type":"function","index":0,"function":{"name":"bash",'
    b'"arguments":""}}]},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"name\\": 1}"}}]}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n',
)
MESSAGES_STREAM = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","stop_reason":null}}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":1,"content_block":'
    b'{"type":"tool_use","id":"toolu_1","name":"Read","input":{}}}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"tool_use"}}\n\n',
)
RESPONSES_STREAM = (
    b'data: {"type":"response.created","response":{"tools":[{"type":"function","name":"other"}]}}\n\n',
    b'data: {"type":"response.output_item.added","item":{"arguments":"","name":"shell","type":"function_call"}}\n\n',
    b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
)


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        (CHAT_STREAM, True),
        (MESSAGES_STREAM, True),
        (RESPONSES_STREAM, True),
        ((b"".join(CHAT_STREAM),), True),
        ((CHAT_STREAM[2],), True),
        ((b'{"content":[{"type":"tool_use","name":"Bash","input":{"a":1}}],"stop_reason":"tool_use"}',), True),
        ((b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}',), False),
        (MESSAGES_STREAM[:2], False),
        ((b'{"content":[{"text":"\\"finish_reason\\":\\"tool_calls\\""}],"stop_reason":"end_turn"}',), False),
    ],
)  # fmt: skip
def test_an_answer_that_waits_for_a_tool(pieces: tuple[bytes, ...], found: bool) -> None:
    """By each API's own words, wherever the network cuts it; generated text says nothing, nor does half an answer."""
    call = ToolCallDetector()
    for piece in pieces:
        call.read_piece(piece)
    assert call.found is found


@pytest.mark.parametrize(
    ("kind", "fields", "asked_s"),
    [
        (RequestKind.CHAT, {"prompt_cache_retention": "24h"}, 86_400),
        (RequestKind.RESPONSES, {"prompt_cache_retention": "in_memory", "input": "x"}, 300),
        (RequestKind.CHAT, {"prompt_cache_options": {"ttl": "30m"}}, 1800),
        (RequestKind.MESSAGES, {"cache_control": {"type": "ephemeral"}}, 300),
        (RequestKind.MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
        (RequestKind.CHAT, {"prompt_cache_retention": "for ever"}, None),
        (RequestKind.CHAT, {"prompt_cache_retention": ["24h"]}, None),
        (RequestKind.CHAT, {"prompt_cache_options": 5}, None),
        (RequestKind.CHAT, {"prompt_cache_retention": "0h"}, None),
        (RequestKind.CHAT, {}, None),
    ],
)
def test_a_body_says_how_long_it_wants_to_be_kept(
    kind: RequestKind, fields: dict[str, object], asked_s: object
) -> None:
    """Nonsense is no wish, and no error: the engine answers for it."""
    request = parse_body(kind, json.dumps({"model": "m", "messages": [], **fields}).encode())
    assert request is not None
    assert request.retention_s == asked_s


@pytest.mark.parametrize(
    ("shape", "part", "asked_s"),
    [
        (b"", b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}]}', 300),
        (b'system:[{"cache_control":{"ttl":"1h"}}]\0', b'{"cache_control": {"type": "ephemeral"}}', 3600),
        (b"", b'{"role":"user","content":"\\"cache_control\\":{\\"ttl\\":\\"1h\\"}"}', None),
    ],
)  # fmt: skip
def test_marks_ask_for_the_longest_of_them(shape: bytes, part: bytes, asked_s: object) -> None:
    """A text that speaks of marks is none."""
    assert read_ttl_s(Prompt(shape, (part,))) == asked_s
