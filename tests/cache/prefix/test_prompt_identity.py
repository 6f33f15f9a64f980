"""prompt_identity: what engines read alike is one prompt, and nothing else is."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import Prompt, RequestKind
from kvproxy.cache.prefix import session_hashes
from kvproxy.cache.prefix.hashing import message_chain, text_blocks
from kvproxy.cache.prefix.prompt_identity import RULED, prompt_identity
from kvproxy.cache.prefix.session_hashes import SessionHashes
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.proxy.request.parse import parse_body

CHAT, MESSAGES = RequestKind.CHAT, RequestKind.MESSAGES
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
MARK = {"type": "ephemeral", "ttl": "1h"}
PROMPTS = Prompts(Tokenizer())


def sent(kind: RequestKind, body: dict[str, Any] | bytes, *, compact: bool = True) -> Prompt:
    separators = (",", ":") if compact else (", ", ": ")
    raw = body if isinstance(body, bytes) else json.dumps(body, separators=separators).encode()
    request = parse_body(kind, raw)
    assert request is not None
    return request.prompt


def identity(kind: RequestKind, body: dict[str, Any] | bytes, *, compact: bool = True) -> Prompt:
    return prompt_identity(kind, sent(kind, body, compact=compact))


def rendered(kind: RequestKind, body: dict[str, Any]) -> list[int]:
    return PROMPTS.encode_anthropic(body) if kind is MESSAGES else PROMPTS.encode_chat(body)


_texts = st.one_of(
    st.sampled_from(["a", '"}]}', "\\", "\\n", "cache_control", '"cache_control"', HEADER.format(1), "\u0142_"]),
    st.text(max_size=8),
)
_blocks = st.lists(_texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
_inputs = st.dictionaries(st.sampled_from(["cache_control", "x"]), _texts)
_calls = st.lists(_inputs.map(lambda given: {"type": "tool_use", "input": given}), max_size=1)


@st.composite
def _bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Small bodies of the Messages API, so that two of them are often alike."""
    messages = [
        {"role": role, "content": draw(st.one_of(_texts, st.builds(lambda one, two: one + two, _blocks, _calls)))}
        for role in ("user", "assistant", "user")[: draw(st.integers(1, 3))]
    ]
    tools = [{"name": "f", "input_schema": {"type": "object", "cache_control": draw(_texts)}}, {"name": "g"}]
    return {"system": draw(st.one_of(_texts, _blocks)), "tools": tools[draw(st.integers(0, 2)) :], "messages": messages}


def _blocks_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    contents = [body["system"], body["tools"], *(message["content"] for message in body["messages"])]
    return [block for content in contents if isinstance(content, list) for block in content]


@st.composite
def _respelled(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two bodies that every engine renders alike: marks elsewhere, another cch, strings for single text parts."""
    plain = draw(_bodies())
    if isinstance(plain["system"], str):
        plain["system"] = [{"type": "text", "text": plain["system"] or "s"}]
    plain["system"].append({"type": "text", "text": "You are."})
    pair = []
    for cch in ("fa690", "00000"):
        body = copy.deepcopy(plain)
        for content in body["messages"]:
            one = content["content"]
            if isinstance(one, str) and one and draw(st.booleans()):
                content["content"] = [{"type": "text", "text": one}]
            elif len(one) == 1 and isinstance(one, list) and one[0].get("text") and draw(st.booleans()):
                content["content"] = one[0]["text"]
        if draw(st.booleans()):
            body["system"].insert(0, {"type": "text", "text": HEADER.format(cch)})
        for block in _blocks_of(body):
            if "cache_control" not in json.dumps(block) and draw(st.booleans()):
                block["cache_control"] = MARK
        pair.append(body)
    return pair[0], pair[1]


@given(_respelled(), st.booleans())
def test_bodies_that_render_alike_are_one_prompt(pair: tuple[dict[str, Any], dict[str, Any]], compact: bool) -> None:
    """Wherever the marks are, whatever the header's value, whichever way a text was put."""
    one, other = pair
    assert rendered(MESSAGES, one) == rendered(MESSAGES, other)
    first, second = (identity(MESSAGES, body, compact=compact) for body in pair)
    texts = [json.dumps(each["content"]) for body in pair for each in body["messages"]]
    if not any(text.count('"cache_control": "') for text in texts):
        assert first == second
    assert first.shape == second.shape


@given(_bodies(), _bodies(), st.sampled_from([CHAT, MESSAGES]))
def test_one_prompt_renders_alike(one: dict[str, Any], other: dict[str, Any], kind: RequestKind) -> None:
    """Whatever enters the prompt is identity: bodies of one identity have the same tokens."""
    if kind is CHAT:
        for body in (one, other):
            system = {"role": "system", "content": body.pop("system")}
            texts = [{**each, "content": each["content"]} for each in body["messages"]]
            body["messages"] = [system, *texts]
            if any("tool_use" in json.dumps(each) for each in texts):
                return
    if identity(kind, one) == identity(kind, other):
        assert rendered(kind, one) == rendered(kind, other)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": HEADER}, {"type": "text", "text": "You are."}],
        [{"type": "text", "text": HEADER, "cache_control": MARK}, {"type": "text", "text": "You are."}],
        HEADER + "\nYou are.",
    ],
    ids=["block", "marked", "string"],
)
def test_the_billing_header_is_left_out(system: Any, compact: bool) -> None:
    """Claude Code puts a new value there with each request, and vLLM drops it: with /v1/messages and with chats."""
    for cch in ("fa690", "00000"):
        new = json.loads(json.dumps(system).replace("{}", cch))
        messages = {"system": new, "messages": [{"role": "user", "content": "Hi"}]}
        plain = {**messages, "system": "You are."}
        assert identity(MESSAGES, messages, compact=compact) == sent(MESSAGES, plain, compact=compact)
        assert rendered(MESSAGES, messages) == rendered(MESSAGES, plain)
        chat = {"messages": [{"role": "system", "content": new}]}
        plain = {"messages": [{"role": "system", "content": "You are."}]}
        assert identity(CHAT, chat, compact=compact) == sent(CHAT, plain, compact=compact)
        assert rendered(CHAT, chat) == rendered(CHAT, plain)


@pytest.mark.parametrize("text", ["note: " + HEADER + "\nYou are.", "You are.\n" + HEADER + "\nMore."])
def test_the_header_elsewhere_is_prompt(text: str) -> None:
    """The engine keeps it there, so it tells two prompts apart."""
    for kind in (CHAT, MESSAGES):
        system = {"role": "system", "content": text.format(1)}
        one = {"messages": [system, {"role": "user", "content": "Hi"}], "system": text.format(1)}
        other = json.loads(json.dumps(one).replace("cch=1", "cch=2"))
        assert rendered(kind, one) != rendered(kind, other)
        assert identity(kind, one) != identity(kind, other)
    later = [{"role": "user", "content": "Hi"}, {"role": "user", "content": HEADER + "\nmore"}]
    assert identity(CHAT, {"messages": later}) == sent(CHAT, {"messages": later})


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":[{"type":"tool_use","input":{"cache_control":{"a":1}}}]}]}',
        b'{"messages":[{"role":"user","content":[{"type":"x","cache\\u005fcontrol":1,"in":{"cache_control":1}}]}]}',
        b'{"tools":[{"name":"f","input_schema":{"cache_control":{"a":1}}}]}',
        b'{"messages":[{"role":"user","content":[{"type":"text","text":""}]}]}',
        b'{"system":[{"type":"text","text":"x-anthropic-billing-header: a"}]}',
        b'{"system":"x-anthropic-billing-header: a\\u000aYou\\nare"}',
    ],
    ids=[
        "a tool's input",
        "an escaped name",
        "a tool's schema",
        "an empty text",
        "nothing else",
        "an escaped line end",
    ],
)
def test_doubtful_parameters_stay(body: bytes) -> None:
    """Names and texts that only look like it."""
    assert identity(MESSAGES, body) == sent(MESSAGES, body)


def test_a_chats_tools_keep_their_marks() -> None:
    """vLLM hands tools of a chat to the template as they are, and templates print them."""
    body = {"messages": [], "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": MARK}]}
    assert identity(CHAT, body) == sent(CHAT, body)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"content": "a", "role": "user"}),
        ({"role": "user", "content": "a"}, {"content": [{"type": "text", "text": "a"}], "role": "user"}),
        ({"role": "tool", "content": "a", "tool_call_id": "c"}, {"role": "tool", "tool_call_id": "c", "content": "a"}),
        (
            {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "c"},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a", "cache_control": MARK}]},
        ),
        ({"b": 1, "a": {}, "role": "x", "content": None}, {"a": {}, "content": None, "b": 1, "role": "x"}),
    ],
)
def test_the_order_of_fields_is_no_part_of_a_prompt(one: dict[str, Any], other: dict[str, Any], compact: bool) -> None:
    """Objects have none. (Of several fields after role and content, the usual beginning, it counts as it was sent.)"""
    first, second = (identity(CHAT, {"messages": [message]}, compact=compact) for message in (one, other))
    assert first == second


@pytest.mark.parametrize("message", ['{"role":"user"}', '{"content":"a"}', "5", '{"a":1,"content":2}'])
def test_unusual_messages_count_as_they_were_sent(message: str) -> None:
    """The engine refuses it, or knows what it is."""
    body = b'{"messages":[' + message.encode() + b"]}"
    assert identity(CHAT, body) == sent(CHAT, body)


def test_the_header_of_a_response_is_the_first_line_of_its_instructions() -> None:
    """It becomes a chat's system message, where it is left out; what a user says begins with it is prompt."""
    plain = {"instructions": "You are.", "input": "Hi", "tools": [{"type": "custom", "name": 'instructions:"x'}]}
    for cch in (1, 2):
        body = {**plain, "instructions": f"{HEADER.format(cch)}\nYou are."}
        assert identity(RequestKind.RESPONSES, body) == sent(RequestKind.RESPONSES, plain)
    said = {**plain, "input": f"{HEADER.format(1)}\nHi"}
    assert identity(RequestKind.RESPONSES, said) == sent(RequestKind.RESPONSES, said)


@pytest.mark.parametrize("kind", [CHAT, MESSAGES, RequestKind.RESPONSES])
def test_where_engines_keep_the_header_it_is_prompt(kind: RequestKind) -> None:
    """SGLang does: a new value there is another prompt from there on."""
    system = [{"type": "text", "text": HEADER.format(1), "cache_control": MARK}, {"type": "text", "text": "You are."}]
    bodies: dict[RequestKind, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "system", "content": HEADER.format(1) + "\nYou are."}]},
        MESSAGES: {"system": system, "messages": [{"role": "user", "content": "Hi"}]},
        RequestKind.RESPONSES: {"instructions": HEADER.format(1) + "\nYou are.", "input": "Hi"},
    }
    one, other = (sent(kind, json.loads(json.dumps(bodies[kind]).replace("cch=1", f"cch={cch}"))) for cch in "12")
    assert prompt_identity(kind, one) == prompt_identity(kind, other)
    kept = [prompt_identity(kind, each, drops_header=False) for each in (one, other)]
    assert kept[0] != kept[1]
    assert b"cache_control" not in kept[0].shape
    if kind in RULED:
        memo = SessionHashes()
        found = [list(memo.identified(kind, each, 8, drops_header=False)[1]) for each in (one, other)]
        assert found == [list(message_chain(each, 8)) for each in kept]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("call", [{"id": "c1", "function": {"name": "f"}}, {"function": {"name": "f"}, "id": "c1"}])
def test_one_text_part_beside_calls_is_that_text(call: dict[str, Any], *, compact: bool) -> None:
    said = {"role": "assistant", "content": 'a ],"tool_calls"', "tool_calls": [call]}
    part = {"type": "text", "text": said["content"]}
    assert identity(CHAT, {"messages": [said]}, compact=compact) == identity(
        CHAT, {"messages": [{**said, "content": [part]}]}, compact=compact
    )
    several = {**said, "content": [part, part]}
    assert identity(CHAT, {"messages": [said]}) != identity(CHAT, {"messages": [several]})


def test_a_system_prompt_of_headers_alone() -> None:
    """The last of them names it, and the one before it, which is new with each request, does not."""

    def body(cch: int) -> dict[str, Any]:
        system = [{"type": "text", "text": HEADER.format(each)} for each in (cch, 1)]
        return {"system": system, "messages": [{"role": "user", "content": "hi"}]}

    assert identity(MESSAGES, body(2)) == identity(MESSAGES, body(3))
    assert identity(MESSAGES, {**body(2), "system": body(2)["system"][1:]}) == identity(MESSAGES, body(3))
    assert rendered(MESSAGES, body(2)) == rendered(MESSAGES, body(3))


@given(st.lists(_bodies(), min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([CHAT, MESSAGES]))
def test_turn_by_turn_hashes_like_whole_prompts(bodies: list[dict[str, Any]], seed: int, kind: RequestKind) -> None:
    """Whatever was kept of earlier turns and however the marks moved."""
    memo, rng, said = SessionHashes(), random.Random(seed), []
    for body in bodies:
        said += [{**each, "content": each["content"] * 100} for each in body["messages"] if each["content"]]
        turn = copy.deepcopy({**bodies[0], "messages": said})
        if isinstance(turn["system"], list):
            turn["system"].insert(0, {"type": "text", "text": HEADER.format(len(said))})
        for block in _blocks_of(turn):
            if rng.random() < 0.3:
                block["cache_control"] = MARK
        if kind is CHAT:
            turn = {"messages": [{"role": "system", "content": turn["system"]}, *turn["messages"]]}
        prompt = sent(kind, turn)
        known = prompt_identity(kind, prompt)
        hashes, keys, size_bytes, text = memo.identified(kind, prompt, 8)
        assert (hashes, list(keys)) == (text_blocks(known, 8), list(message_chain(known, 8)))
        assert size_bytes == known.size_bytes
        assert text is None or tuple(map(text.part_at, range(text.parts))) == known.parts


def test_marks_in_the_middle_of_earlier_messages_are_found_again() -> None:
    """However many messages ended with marks when the prompt came."""
    part = {"type": "text", "text": "a_b"}
    messages = [{"role": "user", "content": [{**part, "cache_control": MARK}, part]}]
    messages += [{"role": "user", "content": [part, {**part, "cache_control": MARK}]}] * 3
    prompt, memo = sent(MESSAGES, {"messages": messages}), SessionHashes()
    memo.identified(MESSAGES, Prompt(prompt.shape, prompt.parts[:3]), 8)
    text = memo.identified(MESSAGES, prompt, 8)[3]
    assert text is not None
    assert [text.part_at(index) for index in (3, 0, 1, 2)] == [text.part_at(1)] * 4


def test_memory_of_chats_as_sent_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused first out; all of it counts as held."""
    monkeypatch.setattr(session_hashes, "_MAX_NAMED_BYTES", 2000)
    memo = SessionHashes()
    for number in range(50):
        memo.identified(CHAT, Prompt(b"", (b"%d" % number,)), 8)
    assert 0 < memo.held_bytes <= 2000


_MARKED = b'{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":[' + b",".join([_MARKED] * 60_000) + b"]}]}",
        b'{"messages":['
        + b",".join([b'{"role":"user","content":[' + b",".join([_MARKED] * 16) + b"]}"] * 4000)
        + b"]}",
        b'{"system":[' + b",".join([_MARKED] * 4000) + b'],"messages":[]}',
        b'{"system":[' + b"1," * 100_000 + b'1],"messages":[{}]}',
        b'{"tools":[' + b",".join([_MARKED] * 60_000) + b'],"messages":[{}]}',
        b'{"messages":[{"role":"user","content":[' + _MARKED[:-1] + b',"x":[' + b"1," * 300_000 + b"1]}]}]}",
        b'{"messages":[' + b",".join([b'{"content":[{"cache_control":1,"x":[%b1]}]}' % (b"1," * 60_000)] * 8) + b"]}",
        b'{"tools":[' + _MARKED + b"," + _MARKED[:-1] + b',"x":[' + b"1," * 300_000 + b'1]},{}],"messages":[{}]}',
    ],
    ids=[
        *("one message", "many messages", "system", "numbers", "tools"),
        *("a message of numbers", "messages of numbers", "tools of numbers"),
    ],
)
def test_a_hostile_body_is_read_as_it_was_sent(body: bytes) -> None:
    """Beyond a bound bytes count as they were sent: looking into them all could take long."""
    prompt = sent(MESSAGES, body)
    known = prompt_identity(MESSAGES, prompt)
    for name, was in ((known.shape, prompt.shape), *zip(known.parts[-1:], prompt.parts[-1:], strict=True)):
        marks = [text.count(b'"cache_control"') for text in (name, was)]
        assert marks[0] in (marks[1], max(0, marks[1] - 1))  # one that ends it all is cut without a look at the others


@pytest.mark.parametrize("kind", sorted(RULED))
def test_a_text_with_quotes_is_the_same_in_a_part_and_as_a_string(kind: RequestKind) -> None:
    """A quotation in a text is no field of its message, whatever its name; a field beside the text is one."""
    text = 'say "hi", "cache_control": "tool_calls", \\"'
    part = {"type": "text", "text": text}
    contents: list[Any] = [text, [part], [part | {"cache_control": MARK}], [part | {"citations": [text]}]]
    first, *others = [identity(kind, {"messages": [{"role": "user", "content": one}]}).parts for one in contents]
    assert [one == first for one in others] == [True, True, False]


_CALL = [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "t", "name": "f", "input": {"x": [{"a": 1}]}}]


@pytest.mark.parametrize("kind", sorted(RULED))
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": 'a "quoted" text'}, {"type": "text", "text": "b"}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": 'ends with "quotes"'}],
        [{"type": "text", "text": "a"}, {"type": "image", "source": {"data": "x"}}],
        [{"type": "tool_result", "tool_use_id": "t", "content": "a"}, {"type": "text", "text": "b"}],
    ],
    ids=["quotes first", "quotes last", "an image last", "a result first"],
)
def test_marks_of_any_part_are_left_out(kind: RequestKind, parts: list[dict[str, Any]], *, compact: bool) -> None:
    """Wherever they are among the parts of a message, and with whatever text around them."""
    identities = {
        identity(kind, {"messages": [{"role": "user", "content": content}]}, compact=compact).parts
        for marks in range(2 ** len(parts))
        for content in [[part | ({"cache_control": MARK} if marks >> n & 1 else {}) for n, part in enumerate(parts)]]
    }
    assert len(identities) == 1


@pytest.mark.parametrize("kind", sorted(RULED))
@pytest.mark.parametrize("name", ["name", "tool_call_id", "cache_control"])
def test_a_member_beside_a_parts_text_is_no_field_of_the_message(kind: RequestKind, name: str) -> None:
    """Templates print names of messages, not of parts."""
    part = {"role": "user", "content": [{"type": "text", "text": "a", name: "b"}]}
    field = {"role": "user", "content": "a", name: "b"}
    assert identity(kind, {"messages": [part]}) != identity(kind, {"messages": [field]})


def test_a_mark_in_an_argument_of_a_last_tool_call_is_prompt() -> None:
    """Only that of the part itself is left out."""
    inner = copy.deepcopy(_CALL)
    inner[1]["input"]["x"][0]["cache_control"] = MARK  # type: ignore[index]
    bodies = [{"messages": [{"role": "assistant", "content": content}]} for content in (_CALL, inner)]
    assert identity(MESSAGES, bodies[0]) != identity(MESSAGES, bodies[1])


def test_a_header_known_from_messages_is_left_out_of_the_same_chat() -> None:
    """Content known by the bytes that were sent may be named by them for one API and not for another."""
    system = {"role": "system", "content": HEADER.format(1) + "\nYou are."}
    memo = SessionHashes()
    for kind in (MESSAGES, CHAT, MESSAGES):
        prompt = sent(kind, {"messages": [system, {"role": "user", "content": "Hi"}]})
        keys = memo.identified(kind, prompt, 8)[1]
        assert list(keys) == list(message_chain(prompt_identity(kind, prompt), 8))


@given(
    st.lists(st.text(st.sampled_from('a"\\\n]}{,'), min_size=1), min_size=1, max_size=3),
    st.sampled_from([CHAT, MESSAGES]),
)
def test_texts_as_parts_are_told_apart(texts: list[str], kind: RequestKind) -> None:
    """A part's text is the same as a string; two parts are not, whatever is quoted in them."""
    parts = [{"type": "text", "text": text} for text in texts]
    listed = identity(kind, {"messages": [{"role": "user", "content": parts}]})
    whole = identity(kind, {"messages": [{"role": "user", "content": "".join(texts)}]})
    assert (listed == whole) == (len(texts) == 1)
