"""parse_body: what routing learns from each API's body, and what it leaves to the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.filters.body import MAX_SESSION_KEY, parse_body
from kvproxy.types import InferenceRequest, RequestKind

CHAT, COMPLETION = RequestKind.CHAT, RequestKind.COMPLETION
RESPONSES, EMBEDDINGS, MESSAGES = RequestKind.RESPONSES, RequestKind.EMBEDDINGS, RequestKind.MESSAGES


def parsed(kind: RequestKind, body: dict[str, Any] | bytes, *, session: str = "") -> InferenceRequest:
    request = parse_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), session=session)
    assert request is not None
    return request


def test_chat_keeps_each_message_as_the_client_wrote_it() -> None:
    """Parts are the messages' own bytes; nothing is re-serialised."""
    body = b'{"model":"m","stream":true,"messages":[ {"role" : "user","content":"h\\u00e9"},\n{"role":"assistant"} ]}'
    request = parsed(CHAT, body)
    assert request.prompt.parts == (b'{"role" : "user","content":"h\\u00e9"}', b'{"role":"assistant"}')
    assert (request.kind, request.model, request.stream, request.prompt.shape) == (CHAT, "m", True, b"")


@pytest.mark.parametrize(
    ("kind", "body", "parts"),
    [
        (COMPLETION, b'{"prompt":"a b"}', (b'"a b"',)),
        (COMPLETION, b'{"prompt":["a","b"]}', (b'["a","b"]',)),
        (COMPLETION, b'{"prompt":[1, 2]}', (b"[1, 2]",)),
        (COMPLETION, b'{"prompt":null}', ()),
        (RESPONSES, b'{"input":"hi"}', (b'"hi"',)),
        (RESPONSES, b'{"input":[{"role":"user"}, {"type":"x"}]}', (b'{"role":"user"}', b'{"type":"x"}')),
        (RESPONSES, b'{"input":[]}', ()),
        (EMBEDDINGS, b'{"input":["a", "b"]}', (b'["a", "b"]',)),
        (EMBEDDINGS, b'{"messages":[{"a":1}]}', (b'{"a":1}',)),
        (MESSAGES, b'{"messages":[{"role":"user"}]}', (b'{"role":"user"}',)),
        (CHAT, b"{}", ()),
    ],
)
def test_prompt_parts(kind: RequestKind, body: bytes, parts: tuple[bytes, ...]) -> None:
    """One part a message where there are messages, else the whole prompt as one."""
    assert parsed(kind, body).prompt.parts == parts


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *((CHAT, name) for name in ("tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")),
        *((CHAT, name) for name in ("add_generation_prompt", "continue_final_message", "mm_processor_kwargs")),
        *((CHAT, name) for name in ("add_special_tokens", "truncate_prompt_tokens")),
        *((COMPLETION, name) for name in ("suffix", "prompt_embeds", "add_special_tokens")),
        *((RESPONSES, name) for name in ("instructions", "tools", "reasoning", "previous_response_id", "prompt")),
        *((MESSAGES, name) for name in ("system", "tools", "thinking")),
    ],
)
def test_what_shapes_the_template_is_in_the_shape(kind: RequestKind, field: str) -> None:
    """Two bodies that differ in such a field never have equal prompts; null is the same as absent."""
    plain, null = parsed(kind, {}).prompt, parsed(kind, {field: None}).prompt
    one, other = parsed(kind, {field: "1"}).prompt, parsed(kind, {field: "2"}).prompt
    assert plain == null
    assert len({plain, one, other}) == 3
    assert field.encode() in one.shape


@pytest.mark.parametrize("field", ["temperature", "tool_choice", "response_format", "max_tokens", "stream", "user"])
def test_what_leaves_the_prompt_alone_is_not_in_the_shape(field: str) -> None:
    """Sampling fields must not split one prefix into many."""
    assert parsed(CHAT, {field: 1}).prompt == parsed(CHAT, {}).prompt


def test_shape_cannot_be_forged_by_moving_text_between_fields() -> None:
    """The end of a field is unambiguous whatever its text says."""
    one = parsed(CHAT, {"tools": "a", "documents": "b"})
    other = parsed(CHAT, {"tools": 'a"\x00documents:"b'})
    assert one.prompt.shape != other.prompt.shape


def test_field_order_of_the_client_does_not_matter() -> None:
    """Clients that serialise the same fields in another order share a prefix."""
    assert (
        parsed(CHAT, {"tools": [1], "documents": [2]}).prompt == parsed(CHAT, {"documents": [2], "tools": [1]}).prompt
    )


@pytest.mark.parametrize(
    ("kind", "body", "session", "key"),
    [
        (CHAT, {"session_id": "s", "user": "u", "prompt_cache_key": "p"}, "h", "h"),
        (CHAT, {"session_id": "s", "user": "u", "prompt_cache_key": "p"}, "", "s"),
        (CHAT, {"user": "u", "prompt_cache_key": "p"}, "", "u"),
        (CHAT, {"prompt_cache_key": "p"}, "", "p"),
        (CHAT, {"session_id": "", "user": "u"}, "", "u"),
        (CHAT, {"session_id": 7}, "", "7"),
        (CHAT, {}, "", None),
        (MESSAGES, {"metadata": {"user_id": "a"}, "user": "u"}, "", "a"),
        (MESSAGES, {"metadata": None, "user": "u"}, "", "u"),
        (CHAT, {"metadata": {"user_id": "a"}}, "", None),
    ],
)
def test_session_key(kind: RequestKind, body: dict[str, Any], session: str, key: str | None) -> None:
    """The header wins, then session_id, then the user, then OpenAI's prompt_cache_key."""
    assert parsed(kind, body, session=session).session_key == key


def test_long_session_keys_become_digests() -> None:
    """A client cannot make us keep a key of any length, and different keys stay different."""
    longest = "k" * MAX_SESSION_KEY
    one, other = (parsed(CHAT, {"user": longest + end}).session_key for end in "ab")
    assert parsed(CHAT, {"user": longest}).session_key == longest
    assert one is not None
    assert one != other
    assert len(one) == 32


@pytest.mark.parametrize(
    ("kind", "body", "limit"),
    [
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        (CHAT, {"max_tokens": "100"}, 100),
        (CHAT, {"max_tokens": 100.0}, 100),
        (CHAT, {"max_tokens": -1}, None),
        (CHAT, {"max_tokens": None}, None),
        (COMPLETION, {"max_tokens": 5}, 5),
        (RESPONSES, {"max_output_tokens": 6}, 6),
        (MESSAGES, {"max_tokens": 8}, 8),
        (EMBEDDINGS, {"max_tokens": 8}, None),
    ],
)
def test_max_tokens(kind: RequestKind, body: dict[str, Any], limit: int | None) -> None:
    """Each API's own name of the limit, read as leniently as engines read it."""
    assert parsed(kind, body).max_tokens == limit


@pytest.mark.parametrize(
    ("stream", "expected"), [(True, True), ("true", True), (1, True), (False, False), (None, False)]
)
def test_stream(stream: object, expected: bool) -> None:
    """Truth is read as leniently as engines read it."""
    assert parsed(CHAT, {"stream": stream}).stream is expected


def test_cache_salt_and_absent_model() -> None:
    """The salt separates caches; a body may leave the model to the engine."""
    request = parsed(CHAT, {"cache_salt": "tenant-a", "model": None})
    assert (request.cache_salt, request.model) == ("tenant-a", "")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b'{"messages":"hi"}',
        b'{"messages":[1,2}',
        b'{"model":5}',
        b'{"model":"\xff"}',
        b'{"user":{}}',
        b'{"max_tokens":"many"}',
        b'{"a":1} trailing',
        b"\xef\xbb\xbf{}",
        b'{"messages":' + b"[" * 100_000,
    ],
    ids=lambda body: str(body[:16]),
)
def test_what_is_no_inference_request_is_left_to_the_engine(body: bytes) -> None:
    """Never an exception: the engine's own error is what the client should see."""
    assert parse_body(CHAT, body) is None


def test_a_huge_responses_input_of_wrong_shape_is_left_to_the_engine() -> None:
    """Nesting beyond the interpreter's limit in a value that is cut apart later is no crash either."""
    assert parse_body(RESPONSES, b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}") is None
