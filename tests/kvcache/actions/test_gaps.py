"""Pauses between an answer and the next turn: what answers say of them, and what is learned."""

from __future__ import annotations

import json

import pytest

from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.prefix.cache_marks import read_ttl_s
from kvproxy.features.leases.gaps import ANY, HORIZON_S, LEAST_SEEN, MAX_KINDS, UNSEEN, Gaps, PendingCall, pause_kind
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
    ("pieces", "tool"),
    [
        (CHAT_STREAM, "bash"),
        (MESSAGES_STREAM, "Read"),
        (RESPONSES_STREAM, "shell"),
        ((b"".join(CHAT_STREAM),), "bash"),
        ((CHAT_STREAM[2],), UNSEEN),
        ((b'{"content":[{"type":"tool_use","name":"Bash","input":{"a":1}}],"stop_reason":"tool_use"}',), "Bash"),
        ((b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}',), None),
        (MESSAGES_STREAM[:2], None),
        ((b'{"content":[{"text":"\\"finish_reason\\":\\"tool_calls\\""}],"stop_reason":"end_turn"}',), None),
    ],
)  # fmt: skip
def test_an_answer_tells_which_tool_it_waits_for(pieces: tuple[bytes, ...], tool: str | None) -> None:
    """By each API's own words, wherever the network cuts it; generated text says nothing, nor does half an answer."""
    call = PendingCall()
    for piece in pieces:
        call.read_piece(piece)
    assert call.tool == tool


def test_pauses_are_learned_by_client_and_tool() -> None:
    """A tool that was never seen goes by what is known of the client's other tools, then of all clients."""
    gaps = Gaps()
    for _ in range(int(LEAST_SEEN)):
        gaps.count(("codex", "bash"), 4.0)
        gaps.count(("opencode", "test"), 100.0)
    bash, other, unknown = gaps.find(("codex", "bash")), gaps.find(("codex", "new")), gaps.find(("roo-code", "new"))
    assert bash is not None
    assert other is not None
    assert unknown is not None
    assert bash.quantile(0.95) == pytest.approx(4.0, rel=0.2)
    assert other.quantile(0.95) == bash.quantile(0.95)
    assert unknown.quantile(0.95) == pytest.approx(100.0, rel=0.2)
    assert gaps.find(("codex", "")) is None


def test_conversations_that_never_go_on_count() -> None:
    """They lower the share that is over at any time, and not the length of pauses that ended."""
    gaps, kind = Gaps(), pause_kind("codex", "bash")
    for number in range(100):
        gaps.count(kind, 2.0 if number % 4 else None)
    pauses = gaps.find(kind)
    assert pauses is not None
    assert pauses.share_over(HORIZON_S) == pytest.approx(0.75)
    assert pauses.share_over(1.0) == 0
    assert pauses.quantile(0.99) == pytest.approx(2.0, rel=0.2)


def test_what_clients_do_today_wins() -> None:
    gaps, kind = Gaps(), ("codex", "bash")
    for seconds in (1.0, 60.0):
        for _ in range(2000):
            gaps.count(kind, seconds)
    pauses = gaps.find(kind)
    assert pauses is not None
    assert pauses.quantile(0.5) == pytest.approx(60.0, rel=0.2)


def test_names_of_tools_are_bounded() -> None:
    """In number and in length: a client chooses them."""
    gaps = Gaps()
    for number in range(3 * MAX_KINDS):
        gaps.count(("codex", f"tool {number}"), 1.0)
    assert len(gaps) <= MAX_KINDS
    assert gaps.find(("codex", ANY)) is not None
    assert len(pause_kind("codex", "x" * 10_000)[1]) <= 64


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
    """What makes no sense is no wish, and no error: the engine answers for it."""
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
