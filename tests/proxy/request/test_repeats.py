"""Messages that came before are recognized: read as if they had not been, compared exactly, within a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import InferenceRequest, RequestKind
from kvproxy.proxy.forward.body_guard import BodySanitizer
from kvproxy.proxy.request import repeats
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import MAX_PARTS, decode_body
from kvproxy.proxy.request.repeats import EarlierBodies, Repeats
from kvproxy.proxy.request.session import NO_CALLER

CHAT = RequestKind.CHAT
COMPACT, SPACED = (",", ":"), (", ", ": ")
LONG = 'a long text \\ with "quotes" and braces } ] , ' * 700
PICTURE = [{"type": "image_url", "image_url": {"url": "http://a/b"}, "uuid": "mine"}]


def says(role: str, content: Any = "hi") -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [says("system", LONG), says("user"), says("assistant", LONG), says("user", "go on")]


def chat(messages: Any, separators: tuple[str, str] = COMPACT, **also: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **also}, separators=separators).encode()


def decode(earlier: EarlierBodies, body: bytes) -> tuple[InferenceRequest | None, Repeats | None]:
    """Decode it, and expect what is decoded without earlier bodies."""
    request, repeated = earlier.decode(CHAT, body, NO_CALLER)
    assert request == decode_body(CHAT, body, NO_CALLER)
    return request, repeated


def left_of(earlier: EarlierBodies, body: bytes) -> int:
    """Return how much of a readable body did not come before."""
    _, repeated = decode(earlier, body)
    assert repeated is not None
    return len(repeated.rest)


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
def test_the_next_turn_is_read_without_the_messages_of_the_last(separators: tuple[str, str]) -> None:
    """As the usual clients write them, turn after turn; only the latest body is held."""
    earlier = EarlierBodies()
    assert left_of(earlier, chat(TALK, separators, tools=[])) > len(LONG)
    for turn in range(1, 4):
        grown = [*TALK, *[says("assistant", "so"), says("user", "and")] * turn]
        assert left_of(earlier, chat(grown, separators, tools=[], n=turn)) < 300
        assert len(earlier) == 1


def test_a_chat_that_goes_on_otherwise_shares_its_beginning() -> None:
    """Two chats with one system prompt, and one whose last messages were changed."""
    earlier = EarlierBodies()
    decode(earlier, chat([TALK[0], says("user"), says("assistant")]))
    other = [TALK[0], says("user", "another"), says("assistant", "x"), says("user", "y")]
    assert left_of(earlier, chat(other)) < 300
    decode(earlier, chat(TALK))
    changed = [*TALK[:3], says("user", "changed"), says("assistant", LONG)]
    assert len(LONG) < left_of(earlier, chat(changed)) < 2 * len(LONG)
    assert left_of(earlier, chat([*changed, says("user")])) < 300


@pytest.mark.parametrize(
    "body",
    [
        chat([says("user", LONG)]),  # too few messages to be held
        chat([says("system", "s"), says("user"), says("assistant")]),  # too short
        chat(["a", *TALK]),  # not all are objects
        chat(TALK, separators=(" , ", ":")),
        json.dumps({"model": "m", "messages" + " ": TALK}).encode(),
        chat({"0": LONG}),
        b'{"model":"m","messages" :' + chat(TALK)[len('{"model":"m","messages":') :],
        b"{",
        chat(TALK)[:-1],
        chat([says("user"), *[says("user", "x")] * MAX_PARTS]),
    ],
)
def test_bodies_that_cannot_repeat_are_not_held(body: bytes) -> None:
    """It is decoded as it would be without."""
    earlier = EarlierBodies()
    decode(earlier, body)
    assert not len(earlier)
    assert not earlier.held_bytes


def test_a_next_turn_in_another_spelling_is_read_and_not_held() -> None:
    """Its earlier messages are recognized all the same."""
    earlier = EarlierBodies()
    body = chat(TALK)
    decode(earlier, body)
    decode(earlier, body.replace(b'"go on"}]', b'"go on"} , {"role":"user","content":"odd"}]'))
    decode(earlier, body.replace(b'"go on"}]', b'"go on"},1]'))
    for broken in (b'"go on"},]', b'"go on"}.5]', b'"go on"}}]', b'"go on"}', b'"go on"},{"role":"\xff"}]'):
        decode(earlier, body.replace(b'"go on"}]', broken))


def test_more_messages_than_there_are_parts_are_scanned() -> None:
    """As without earlier bodies."""
    earlier = EarlierBodies()
    decode(earlier, chat(TALK))
    request, repeated = decode(earlier, chat([*TALK, *[says("user", "x")] * MAX_PARTS]))
    assert request is None
    assert repeated is None


@pytest.mark.parametrize(
    "before", [b'"x":{"messages":%b},"messages":[]', b'"messages":%b,"messages":[{"role":"user"}]']
)
def test_messages_elsewhere_in_a_body_are_not_taken_for_its_own(before: bytes) -> None:
    """A nested member of that name, or one that another replaces."""
    earlier = EarlierBodies()
    for messages in (TALK, [*TALK, says("assistant")], [*TALK, says("assistant"), says("user", "end")]):
        listed = json.dumps(messages, separators=COMPACT).encode()
        request, _ = decode(earlier, b"{" + before % listed + b"}")
        assert request is not None
        assert len(request.prompt.parts) < 2


def test_texts_are_held_within_a_bound() -> None:
    """The longest unused go first; a body over the bound is not held, with where its messages start: many short ones
    take more than their text."""
    earlier = EarlierBodies(max_bytes=3 * len(chat(TALK)) + 1000)
    for session in range(5):
        decode(earlier, chat([says("system", f"session {session}"), *TALK]))
        assert earlier.held_bytes <= 3 * len(chat(TALK)) + 1000
    assert len(earlier) == 3
    assert left_of(earlier, chat([says("system", "session 4"), *TALK, says("assistant")])) < 300
    assert left_of(earlier, chat([says("system", "session 0"), *TALK, says("assistant")])) > len(LONG)
    many = chat([{"a": 1}] * MAX_PARTS)
    tiny = EarlierBodies(max_bytes=len(many) + 1000)
    decode(tiny, many)
    assert not len(tiny)
    small = EarlierBodies(max_bytes=100)
    decode(small, chat(TALK))
    assert not len(small)


def test_a_body_too_long_for_one_step_is_left_to_the_scan() -> None:
    assert EarlierBodies().decode(CHAT, b" " * (repeats.MAX_DECODED_BYTES + 1), NO_CALLER) == (None, None)


TEXTS = st.sampled_from(["", LONG, LONG + "x", '"messages":[', "uuid", '{"', "\\u0075"])
CONTENTS = TEXTS | st.just(PICTURE) | st.just({"uuid": "x"})
MESSAGES = st.lists(st.builds(says, st.sampled_from(["user", "assistant"]), CONTENTS), min_size=1, max_size=6)


@given(
    talks=st.lists(MESSAGES, min_size=1, max_size=2),
    cuts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), min_size=1, max_size=6),
    separators=st.sampled_from([COMPACT, SPACED]),
)
def test_whatever_came_before_a_body_is_decoded_and_guarded_alike(
    talks: list[list[dict[str, Any]]], cuts: list[tuple[int, int]], separators: tuple[str, str]
) -> None:
    """Facts and the guard's verdict are those of a proxy that has seen no body."""
    earlier = EarlierBodies()
    guard = BodySanitizer()
    for which, count in cuts:
        body = chat(talks[which % len(talks)][:count], separators)
        request, repeated = decode(earlier, body)
        verdicts = []
        for known in (repeated, None):
            exchange = Exchange(received_at=0.0)
            exchange.body = body
            exchange.inference = request
            exchange.repeats = known
            verdicts.append(guard.passes(body, exchange))
        assert verdicts[0] is verdicts[1]


@pytest.mark.parametrize("also", [{}, {"remote_host": "h"}])
async def test_the_guard_finds_names_in_new_messages_and_in_those_it_has_not_passed(also: dict[str, str]) -> None:
    """A trusted client's messages were never searched."""
    earlier = EarlierBodies()
    guard = BodySanitizer()
    pictured = [*TALK[:3], says("user", PICTURE), says("assistant"), says("user")]
    for messages, trusted in ((TALK, False), (pictured[:4], True), (pictured, False), ([*TALK, *pictured], False)):
        exchange = Exchange(received_at=0.0)
        exchange.body = body = chat(messages, **also)
        exchange.inference, exchange.repeats = decode(earlier, body)
        exchange.trusted = trusted
        sent = await guard.checked(body, exchange, [])
        assert (b'"uuid"' in sent) is trusted
        assert (b"remote_host" in sent) is (trusted and bool(also))


def test_parts_passed_by_the_guard_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn costs a search of its new messages."""
    earlier = EarlierBodies()
    guard = BodySanitizer()
    searched: list[int] = []
    monkeypatch.setattr(
        "kvproxy.proxy.forward.body_guard.may_name_media", lambda text: bool(searched.append(len(text)))
    )
    for messages in (TALK, [*TALK, says("assistant"), says("user")]):
        exchange = Exchange(received_at=0.0)
        exchange.body = body = chat(messages)
        exchange.inference, exchange.repeats = decode(earlier, body)
        assert guard.passes(body, exchange)
    assert searched[-1] < 300
    assert len(searched) == 2
