"""parse_body: what routing learns from each API's body, and what it leaves to the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvproxy.base.json_scan import MAX_DECODED_BYTES
from kvproxy.base.types import InferenceRequest, RequestKind
from kvproxy.proxy.request.parse import (
    MAX_NAME,
    MAX_PARTS,
    MAX_PROMPT_BYTES,
    parse_body,
    read_body,
)
from kvproxy.proxy.request.session import MAX_SESSION_KEY, Caller, Session
from tests.support.examples import examples

CHAT, COMPLETION = RequestKind.CHAT, RequestKind.COMPLETION
RESPONSES, EMBEDDINGS, MESSAGES = RequestKind.RESPONSES, RequestKind.EMBEDDINGS, RequestKind.MESSAGES


def parsed(kind: RequestKind, body: dict[str, Any] | bytes, *, session: str = "") -> InferenceRequest:
    caller = Caller(Session(session) if session else None)
    request = parse_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), caller=caller)
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
def test_template_inputs_are_in_the_shape(kind: RequestKind, field: str) -> None:
    """Two bodies that differ in such a field never have equal prompts; null is the same as absent."""
    plain, null = parsed(kind, {}).prompt, parsed(kind, {field: None}).prompt
    one, other = parsed(kind, {field: "1"}).prompt, parsed(kind, {field: "2"}).prompt
    assert plain == null
    assert len({plain, one, other}) == 3
    assert field.encode() in one.shape


@pytest.mark.parametrize("field", ["temperature", "tool_choice", "response_format", "max_tokens", "stream", "user"])
def test_fields_without_effect_on_the_prompt_are_not_in_the_shape(field: str) -> None:
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
        (CHAT, {"prompt_cache_key": "p"}, "", None),
        (CHAT, {"session_id": "", "user": "u"}, "", "u"),
        (CHAT, {"session_id": 7}, "", "7"),
        (CHAT, {}, "", None),
        (MESSAGES, {"metadata": {"user_id": "a"}, "user": "u"}, "", "a"),
        (MESSAGES, {"metadata": None, "user": "u"}, "", "u"),
        (CHAT, {"metadata": {"user_id": "a"}}, "", None),
    ],
)
def test_session_key(kind: RequestKind, body: dict[str, Any], session: str, key: str | None) -> None:
    """The header wins, then session_id, then the user. OpenAI's prompt_cache_key names a group of sessions."""
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
        b'{"messages":[1,2}',
        b'{"a":1} trailing',
        "{}".encode("utf-16"),
        b'{"messages":' + b"[" * 100_000,
    ],
    ids=lambda body: str(body[:16]),
)
def test_other_requests_are_left_to_the_engine(body: bytes) -> None:
    """Never an exception: the engine's own error is what the client should see."""
    assert parse_body(CHAT, body) is None


def test_a_huge_responses_input_of_wrong_shape_is_left_to_the_engine() -> None:
    """Nesting beyond the interpreter's limit in a value that is cut apart later is no crash either."""
    assert parse_body(RESPONSES, b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}") is None


@pytest.mark.parametrize(
    "odd",
    [
        b'"temperature":NaN',
        b'"session_id":{}',
        b'"session_id":[1]',
        b'"user":false',
        b'"stream":"perhaps"',
        b'"max_tokens":"many"',
        b'"max_tokens":NaN',
        b'"cache_salt":1',
        b'"prompt_cache_key":"\\ud800"',
        b'"x":"\\ud800"',
        b'"metadata":5',
    ],
)
def test_one_odd_field_does_not_spoil_the_others(odd: bytes) -> None:
    """Engines read such bodies, so limits, affinity and retries must hold for them."""
    body = b'{"messages":[{"a":1}, {"b":2}],' + odd + b',"model":"m"}'
    for kind in (CHAT, MESSAGES):
        request = parsed(kind, body)
        assert (request.model, request.prompt.parts) == ("m", (b'{"a":1}', b'{"b":2}'))
        assert request.session_key is None or request.session_key == "False"
        assert request.max_tokens is None


def test_a_byte_order_mark_is_passed_over() -> None:
    """As Python's own parser passes it over."""
    assert parsed(CHAT, b'\xef\xbb\xbf {"model":"m"}').model == "m"


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_long_names_become_digests(field: str) -> None:
    """Names are kept in many places: none of them may be as long as a client likes. Different ones stay different."""
    longest = "n" * MAX_NAME

    def name(text: str) -> str:
        found: str = getattr(parsed(CHAT, {field: text}), field)
        return found

    assert name(longest) == longest
    assert len(name(longest + "a")) == 32
    assert name(longest + "a") != name(longest + "b")
    huge = 3 * MAX_DECODED_BYTES * "n"  # scanned
    assert len(name(huge)) == 32
    assert name(huge + "a") != name(huge + "b")


@pytest.mark.parametrize("limit", [2**31 + 1, 10**30])
def test_no_engine_makes_so_many_tokens(limit: int) -> None:
    """A limit beyond reason is none."""
    assert parsed(CHAT, {"max_tokens": limit}).max_tokens is None


@pytest.mark.parametrize(("digits", "length"), [(20, 20), (4_000, 32), (9_000, 0)])
def test_a_session_key_of_many_digits(digits: int, length: int) -> None:
    """Python refuses to write the longest ones in decimal: they count as absent."""
    assert len(parsed(CHAT, b'{"session_id":' + b"7" * digits + b"}").session_key or "") == length


def chat(messages: list[bytes], *, tools: bytes = b"[]") -> bytes:
    return b'{"tools":' + tools + b',"messages":[' + b" ,".join(messages) + b'],"model":"m"}'


def numbered(count: int) -> Iterator[bytes]:
    return (b'{"role":"user","content":"%d"}' % number for number in range(count))


@pytest.mark.parametrize("padding", [0, 300_000, 3_000_000], ids=["decoded", "decoded as large", "scanned"])
@pytest.mark.parametrize("count", [MAX_PARTS - 1, MAX_PARTS, MAX_PARTS + 1, MAX_PARTS + 2])
def test_parts_are_bounded_in_number(count: int, padding: int) -> None:
    """All further messages are one part, however the body is read."""
    messages = list(numbered(count))
    body = chat(messages, tools=b'["' + b"t" * padding + b'"]')
    for kind in (CHAT, MESSAGES, EMBEDDINGS):
        parts = parsed(kind, body).prompt.parts
        assert len(parts) == min(count, MAX_PARTS + 1)
        assert parts[:MAX_PARTS] == tuple(messages[:MAX_PARTS])
        assert count <= MAX_PARTS or parts[-1] == b" ,".join(messages[MAX_PARTS:])
    as_input = body.replace(b'"messages"', b'"input"')
    assert parsed(RESPONSES, as_input).prompt.parts == parsed(CHAT, body).prompt.parts


@pytest.mark.parametrize("count", [1, 5])
def test_a_prompt_is_bounded_in_bytes(count: int) -> None:
    """Bytes over the bound are counted and digested: the beginning is shared, prompts that differ stay different."""
    text = b"x" * (MAX_PROMPT_BYTES // count)
    messages = [b'{"content":"' + text + b'"}'] * count
    one, other = (parsed(CHAT, chat([*messages, end])).prompt for end in (b'"one"', b'"two"'))
    for prompt in (one, other):
        assert len(prompt.shape) + sum(map(len, prompt.parts)) < MAX_PROMPT_BYTES + 200
        assert prompt.unread_bytes > 0
        assert prompt.size_bytes == pytest.approx(count * len(messages[0]), abs=200)
    assert one.parts[:-1] == other.parts[:-1]
    assert one.parts[-1][:-32] == other.parts[-1][:-32]
    assert one.parts[-1] != other.parts[-1]


def test_long_tools_count_for_the_bound_too() -> None:
    """They are the beginning of the prompt."""
    tools = b'["' + b"t" * (2 * MAX_PROMPT_BYTES) + b'"]'
    prompt = parsed(CHAT, chat([b"{}", b"{}"], tools=tools)).prompt
    assert len(prompt.shape) < MAX_PROMPT_BYTES + 200
    assert len(prompt.parts) == 1
    assert prompt.unread_bytes == pytest.approx(MAX_PROMPT_BYTES, abs=200)


_sizes = st.lists(st.sampled_from([0, 1, 200, 70_000, 900_000, 3_000_000]), min_size=1, max_size=6)


@settings(max_examples=examples(10))
@given(sizes=_sizes, many=st.sampled_from([0, MAX_PARTS - 3, MAX_PARTS + 3]), grown=st.integers(1, 4))
@example(sizes=[3_000_000, 3_000_000, 1], many=0, grown=2)
@example(sizes=[900_000, 900_000, 1], many=MAX_PARTS - 3, grown=3)
def test_a_chat_that_grows_shares_all_its_earlier_parts(sizes: list[int], many: int, grown: int) -> None:
    """Also where it grows beyond what is decoded at once, beyond the parts and beyond the bytes."""
    messages = [*numbered(many), *(b'{"content":"' + b"c" * size + b'"}' for size in sizes)]
    earlier = parsed(CHAT, chat(messages)).prompt
    later = parsed(CHAT, chat([*messages, *[b'{"content":"' + b"d" * 500_000 + b'"}'] * grown])).prompt
    whole = earlier.parts
    if len(whole) > MAX_PARTS or earlier.unread_bytes:
        assert later.parts[len(whole) - 1].startswith(whole[-1].partition(b"\0")[0])
        whole = whole[:-1]
    assert later.parts[: len(whole)] == whole
    assert later.shape == earlier.shape


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
_fields = st.sampled_from(
    ["model", "messages", "prompt", "input", "tools", "stream", "user", "session_id", "max_tokens", "cache_salt", "x"]
)
_bodies = st.dictionaries(_fields, _json, max_size=5).map(lambda body: json.dumps(body).encode())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a body with a few bytes that do not belong there."""
    body = bytearray(draw(_bodies))
    for place, byte in draw(
        st.lists(st.tuples(st.integers(0, 200), st.sampled_from(b'"\\[]{},:\xff \0n1')), max_size=3)
    ):
        body[place % (len(body) + 1) : place % (len(body) + 1)] = bytes((byte,))
    return bytes(body)


@given(body=mutated() | st.binary(max_size=64), kind=st.sampled_from(list(RequestKind)))
def test_the_parser_never_raises(body: bytes, kind: RequestKind) -> None:
    """Whatever the bytes are; and reading in steps says the same."""
    request = parse_body(kind, body)
    assert asyncio.run(read_body(kind, body, pace=asyncio.Lock())) == request
    if request is not None:
        assert len(request.model) <= MAX_NAME
        assert len(request.cache_salt or "") <= MAX_NAME
        assert len(request.session_key or "") <= MAX_SESSION_KEY


@settings(max_examples=examples(40))
@given(body=_bodies, kind=st.sampled_from(list(RequestKind)))
def test_scanning_reads_what_decoding_reads(body: bytes, kind: RequestKind) -> None:
    """Otherwise a chat would lose its prefix when it becomes long."""
    decoded = parse_body(kind, body)
    padding = b'"padding":"' + b"p" * MAX_DECODED_BYTES + b'"}'
    scanned = parse_body(kind, body[:-1] + (b"," if len(body) > 2 else b"") + padding)
    assert decoded == scanned
