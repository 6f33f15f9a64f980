"""Changes between a session's last prompt and the one it returned with, by digests alone."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvproxy.base.types import RequestKind
from kvproxy.cache.prefix.session_hashes import PromptText, SessionHashes
from kvproxy.features.hygiene.comparison import ADVICE, Cause, Change, find_change
from kvproxy.features.hygiene.parts import digest_part
from kvproxy.features.hygiene.threads import DIGEST, LENGTH, MAX_THREADS, Session, Sessions, Thread, add_messages
from kvproxy.proxy.request.parse import parse_body

MESSAGES, CHAT, RESPONSES = RequestKind.MESSAGES, RequestKind.CHAT, RequestKind.RESPONSES
PATHS = {MESSAGES: "messages", CHAT: "messages", RESPONSES: "input"}
Body = dict[str, Any]


def words(tag: str, count: int = 60) -> str:
    return " ".join(f"{tag}{number}" for number in range(count))


def tool(name: str, description: str = "") -> Body:
    return {"name": name, "description": description or words(name), "input_schema": {"type": "object"}}


def agent(turns: int, **changes: Any) -> Body:
    """Return a coding agent's prompt after so many turns: tools, three system blocks, messages by user and
    assistant."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": words(f"ask{turn}-")})
        messages.append({"role": "assistant", "content": words(f"answer{turn}-")})
    messages.append({"role": "user", "content": words(f"ask{turns}-")})
    system = [{"type": "text", "text": f"{words('role')}\n{words('rule')}\nToday: soon\n{words('end')}"}]
    return {
        "model": "m",
        "tools": [tool("read"), tool("write"), tool("run")],
        "system": [*system, {"type": "text", "text": words("project")}, {"type": "text", "text": words("more")}],
        "messages": messages,
        **changes,
    }


class Conversations:
    """One session's prompts, seen as the service sees them."""

    def __init__(self, kind: RequestKind = MESSAGES) -> None:
        self._kind = kind
        self._hashes = SessionHashes()
        self.sessions = Sessions()

    @property
    def session(self) -> Session:
        return self.sessions.use(("", "s"))

    def send(self, body: Body, *, model: str = "m") -> Change | None:
        """Send a prompt to its end; returns the change."""
        request = parse_body(self._kind, json.dumps(body).encode())
        assert request is not None
        seed = sum(model.encode())
        if self._kind is RESPONSES:
            blocks, keys, _, text = self._hashes.identified(CHAT, request.prompt, seed)  # whose rules touch none of it
        else:
            blocks, keys, _, text = self._hashes.identified(self._kind, request.prompt, seed)
        assert text is not None
        session = self.session
        thread = session.continued_by(keys)
        if thread is not None:
            self.sessions.go_on(session, thread, keys, blocks, text)
            return None
        new = Thread.begun(model, keys, blocks, text, self.sessions.heads.head_of(text))
        change = find_change(session, new, text)
        replaced = None if change is None or change.cause is Cause.MODEL_SWITCH else change.thread
        self.sessions.add(session, new, instead_of=replaced)
        return change


def edited(body: Body, path: str, change: Callable[[Any], Any]) -> Body:
    """Return the body with one value, named as `system.0.text`, changed."""
    copy = json.loads(json.dumps(body))
    at, names = copy, path.split(".")
    for name in names[:-1]:
        at = at[int(name)] if name.isdigit() else at[name]
    last: Any = int(names[-1]) if names[-1].isdigit() else names[-1]
    at[last] = change(at[last])
    return copy


def dated(date: str) -> Callable[[str], str]:
    return lambda text: text.replace("Today: soon", f"Today: {date}")


def header(value: str) -> Callable[[list[Body]], list[Body]]:
    return lambda blocks: [{"type": "text", "text": f"x-other-header: {value};"}, *blocks]


def counted(left: int) -> Callable[[list[Body]], list[Body]]:
    return lambda blocks: [*blocks, {"type": "text", "text": f"<total_tokens>{left} tokens left</total_tokens>"}]


FIRST, NEXT = agent(3), agent(4)
SUMMARY = "This session is being continued from a previous conversation"
CHANGED: dict[str, tuple[Body, Body, Cause, str]] = {
    "a date in the system prompt": (
        edited(FIRST, "system.0.text", dated("2026-09-01 12:00")),
        edited(NEXT, "system.0.text", dated("2026-09-01 12:01")),
        Cause.DATE_OR_ID,
        "system block 1, line 3",
    ),
    "an id in the system prompt": (
        edited(FIRST, "system.0.text", dated("run 5f3a2b1c9d")),
        edited(NEXT, "system.0.text", dated("run 0c1d2e3f4a5b6c")),
        Cause.DATE_OR_ID,
        "system block 1, line 3",
    ),
    "a header that the rules of identity do not know": (
        edited(FIRST, "system", header("a1")),
        edited(NEXT, "system", header("b2")),
        Cause.VOLATILE_HEADER,
        "system block 1, line 1",
    ),
    "a token counter behind the system prompt": (
        edited(FIRST, "system", counted(1000)),
        edited(NEXT, "system", counted(40)),
        Cause.TOKEN_COUNTER,
        "system block 4, line 1",
    ),
    "a token counter that comes once more each time": (
        FIRST,
        edited(NEXT, "system", counted(40)),
        Cause.TOKEN_COUNTER,
        "system block 4, line 1",
    ),
    "a sentence of the system prompt": (
        FIRST,
        edited(NEXT, "system.1.text", lambda text: text + " and be brief"),
        Cause.SYSTEM,
        "system block 2, line 1",
    ),
    "a system block that is gone": (
        FIRST, edited(NEXT, "system", lambda all_: all_[:2]), Cause.SYSTEM, "system block 2, line 1",
    ),
    "tools in another order": (FIRST, edited(NEXT, "tools", lambda all_: all_[::-1]), Cause.TOOL_ORDER, "tool 1"),
    "a tool more": (FIRST, edited(NEXT, "tools", lambda all_: [*all_, tool("new")]), Cause.TOOLS, "tool 4"),
    "a tool with a date in its description": (
        edited(FIRST, "tools.1.description", lambda text: text + " 2026-09-01"),
        edited(NEXT, "tools.1.description", lambda text: text + " 2026-09-02"),
        Cause.DATE_OR_ID,
        "tool 2",
    ),
    "a tool that is described anew": (
        FIRST,
        edited(NEXT, "tools.1.description", lambda text: text.replace("write7", "read7")),
        Cause.TOOLS,
        "tool 2",
    ),
    "tools for the first time": (edited(FIRST, "tools", lambda _: []), NEXT, Cause.TOOLS, "tool 1"),
    "no tools any more": (FIRST, {**NEXT, "tools": None}, Cause.TOOLS, "tool 1"),
    "no system prompt any more": (FIRST, {**NEXT, "system": None}, Cause.SYSTEM, "system block 1"),
    "a token counter that makes two blocks of one": (
        edited(FIRST, "system", lambda all_: all_[:1]),
        edited(NEXT, "system", lambda all_: counted(40)(all_[:1])),
        Cause.TOKEN_COUNTER,
        "system block 2, line 1",
    ),
    "the end of the system prompt, cut off": (
        edited(FIRST, "system", lambda _: words("role", 100)),
        edited(NEXT, "system", lambda _: words("role", 90)),
        Cause.SYSTEM,
        "system block 1, line 1",
    ),
    "thinking": (FIRST, {**NEXT, "thinking": {"type": "enabled"}}, Cause.TEMPLATE, "template"),
    "a message": (
        FIRST,
        edited(NEXT, "messages.2.content", lambda text: text + " and something else that was never said before it"),
        Cause.MESSAGE,
        "message 3",
    ),
    "the time in a message": (
        edited(FIRST, "messages.0.content", lambda text: "12:01 " + text),
        edited(NEXT, "messages.0.content", lambda text: "12:34 " + text),
        Cause.DATE_OR_ID,
        "message 1",
    ),
    "the last message, on its second coming": (
        FIRST,
        edited(NEXT, "messages.6.content", lambda text: text[: len(text) // 2]),
        Cause.MESSAGE,
        "message 7",
    ),
    "what a tool answered, cleared": (
        FIRST,
        edited(NEXT, "messages.1.content", lambda text: "cleared"),
        Cause.COMPACTION,
        "message 2",
    ),
    "the oldest messages, dropped": (
        FIRST,
        edited(NEXT, "messages", lambda all_: [all_[0], *all_[3:]]),
        Cause.COMPACTION,
        "message 2",
    ),
    "all of the history but a summary and the last messages": (
        FIRST,
        edited(NEXT, "messages", lambda all_: [{"role": "user", "content": "In short: it works."}, *all_[5:]]),
        Cause.COMPACTION,
        "message 1",
    ),
    "all of the history but a summary": (
        FIRST,
        edited(
            NEXT,
            "messages",
            lambda _: [{"role": "user", "content": f"{SUMMARY}: {words('so')}"}],
        ),
        Cause.COMPACTION,
        "message 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_the_first_part_that_changed_is_named(case: str) -> None:
    """With the class of its change."""
    before, after, cause, part = CHANGED[case]
    conversations = Conversations()
    assert conversations.send(before) is None
    change = conversations.send(after)
    assert change is not None
    assert (change.cause, change.part) == (cause, part)
    assert change.again_bytes > 256


def test_every_cause_has_its_advice() -> None:
    """The event, and its remedy."""
    assert set(ADVICE) == set(Cause)


def test_repeated_bytes_are_counted() -> None:
    """Behind a date in the first system block: its other lines and blocks, tools, all messages of the last turn."""
    conversations = Conversations()
    before = edited(FIRST, "system.0.text", dated("2026-09-01"))
    conversations.send(before)
    change = conversations.send(edited(NEXT, "system.0.text", dated("2026-09-02")))
    assert change is not None
    messages = sum(len(json.dumps(message)) for message in before["messages"])
    behind = len(words("end")) + len(words("project")) + len(words("more")) + len(json.dumps(before["tools"]))
    assert messages + behind <= change.again_bytes <= messages + behind + 200


def test_a_chat_has_its_system_prompt_among_its_messages() -> None:
    """It is a system block, and messages are counted as the client counts them."""

    def body(turns: int, date: str) -> Body:
        chat = agent(turns)
        text = f"{words('role')}\nToday: {date}\n{words('rule')}"
        return {"model": "m", "messages": [{"role": "system", "content": text}, *chat["messages"]]}

    conversations = Conversations(CHAT)
    conversations.send(body(3, "2026-09-01"))
    change = conversations.send(body(4, "2026-09-02"))
    assert change is not None
    assert (change.cause, change.part) == (Cause.DATE_OR_ID, "system block 1, line 2")
    rewritten = edited(body(5, "2026-09-02"), "messages.3.content", lambda text: text + words("more"))
    change = conversations.send(rewritten)
    assert change is not None
    assert (change.cause, change.part) == (Cause.MESSAGE, "message 4")


def test_responses_have_instructions_and_input_items() -> None:
    """The instructions are a system block."""

    def body(turns: int, line: str) -> Body:
        items = [{"type": "message", **message} for message in agent(turns)["messages"]]
        return {"model": "m", "instructions": f"{words('role')}\n{line}", "input": items}

    conversations = Conversations(RESPONSES)
    conversations.send(body(2, "12:00"))
    change = conversations.send(body(3, "12:05"))
    assert change is not None
    assert (change.cause, change.part) == (Cause.DATE_OR_ID, "system block 1, line 2")


def test_a_conversation_that_goes_on_with_another_model() -> None:
    """Both models' conversations are kept: it may go back."""
    conversations = Conversations()
    conversations.send(FIRST, model="large")
    change = conversations.send(NEXT, model="small")
    assert change is not None
    assert (change.cause, change.part) == (Cause.MODEL_SWITCH, "model")
    assert conversations.send(agent(5), model="large") is None
    assert conversations.send(agent(5), model="small") is None


CLEAN: dict[str, list[Body]] = {
    "it goes on": [FIRST, NEXT, agent(5)],
    "it is sent again": [FIRST, FIRST, NEXT, NEXT],
    "it is taken back by two turns and goes on from there": [
        agent(5), edited(FIRST, "messages.6.content", str.upper), edited(NEXT, "messages.6.content", str.upper),
    ],
    "its last message is edited": [NEXT, edited(NEXT, "messages.8.content", str.upper), NEXT],
    "a branch with messages of its own": [
        NEXT, edited(FIRST, "messages.6.content", str.upper), agent(5),
    ],
    "a sub-agent with another system prompt and the same first message": [
        FIRST, {**agent(0), "system": "You search files."}, NEXT,
    ],
    "a side request with all of it in one message": [
        FIRST,
        {"model": "m", "system": "Give a title.", "messages": [{"role": "user", "content": words("ask0-")}]},
        NEXT,
    ],
    "another chat of the same user with a few equal words": [
        {"model": "m", "messages": [{"role": "user", "content": words("x")}, {"role": "user", "content": "go on"}]},
        {"model": "m", "messages": [{"role": "user", "content": words("y")}, {"role": "user", "content": "go on"},
                                    {"role": "user", "content": words("z")}]},
    ],
    "the marks move": [
        edited(FIRST, "messages.6", lambda one: {"role": "user", "content": [
            {"type": "text", "text": one["content"], "cache_control": {"type": "ephemeral"}}]}),
        edited(NEXT, "messages.8", lambda one: {"role": "user", "content": [
            {"type": "text", "text": one["content"], "cache_control": {"type": "ephemeral"}}]}),
    ],
    "the billing header changes, which is no part of the prompt": [
        edited(body, "system", lambda blocks, n=number: [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={n};"}, *blocks])
        for number, body in enumerate((FIRST, NEXT, agent(5)))
    ],
    "a new task with the same head": [NEXT, {**agent(0), "messages": [{"role": "user", "content": words("task")}]}],
}  # fmt: skip


@pytest.mark.parametrize("case", CLEAN)
def test_a_harmless_difference_is_not_reported(case: str) -> None:
    """Retries, branches, sub-agents, side requests."""
    conversations = Conversations()
    assert [conversations.send(body) for body in CLEAN[case]] == [None] * len(CLEAN[case])


def sub_agent(number: int, turns: int) -> Body:
    """Return a conversation that begins as all of its session do."""
    own = [{"role": "user", "content": words(f"{number}-{turn}-")} for turn in range(turns)]
    return {**agent(0), "messages": [*agent(1)["messages"], *own]}


def test_sub_agents_side_by_side_are_threads_of_one_session() -> None:
    """Ten of them, which share how they begin, each turn of one between turns of the others."""

    conversations = Conversations()
    found = [conversations.send(sub_agent(sub, turns)) for turns in (1, 3, 5, 7) for sub in range(10)]
    assert found == [None] * 40


def test_more_conversations_than_are_kept_are_no_breaks() -> None:
    """A session that had more is not believed to have rewritten its last message."""

    conversations = Conversations()
    found = [conversations.send(sub_agent(sub, turns)) for turns in (1, 3, 5) for sub in range(2 * MAX_THREADS)]
    assert found == [None] * len(found)
    assert len(conversations.session.threads) == MAX_THREADS


def test_a_client_that_breaks_every_turn_is_one_conversation() -> None:
    """A broken turn takes the place of the one that it broke."""
    conversations = Conversations()
    for turn in range(20):
        change = conversations.send(edited(agent(turn), "system.0.text", dated(f"2026-09-01 12:{turn:02}")))
        assert (change is None) == (turn == 0)
    assert len(conversations.session.threads) == 1


def test_kept_entries_are_bounded_and_counted() -> None:
    """In sessions and in bytes; the longest unused goes first."""
    conversations = Conversations()
    sessions = conversations.sessions = Sessions(max_sessions=3, max_bytes=20_000)
    hashes = SessionHashes()
    for number in range(8):
        request = parse_body(MESSAGES, json.dumps(agent(number)).encode())
        assert request is not None
        blocks, keys, _, text = hashes.identified(MESSAGES, request.prompt, 8)
        assert text is not None
        session = sessions.use(("", str(number)))
        sessions.add(session, Thread.begun("m", keys, blocks, text, sessions.heads.head_of(text)))
        assert len(sessions) <= 3
    assert sessions.held_bytes <= 20_000 + sessions.heads.held_bytes
    for number in range(8):
        sessions.forget(("", str(number)))
    assert (len(sessions), sessions.held_bytes) == (0, sessions.heads.held_bytes)


def test_a_session_larger_than_all_the_room_is_not_kept() -> None:
    """Nor does it stay in the count."""
    conversations = Conversations()
    conversations.sessions = Sessions(max_bytes=100)
    conversations.send(FIRST)
    assert len(conversations.sessions) == 0
    assert conversations.sessions.held_bytes == conversations.sessions.heads.held_bytes


def test_no_text_is_kept() -> None:
    """Digests, sizes and counts alone."""
    conversations = Conversations()
    conversations.send(FIRST)
    (thread,) = conversations.session.threads

    def kept(value: object) -> list[object]:
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.astuple(value)
        if isinstance(value, tuple | list):
            return [found for each in value for found in kept(each)]
        return [value]

    held = kept(thread)
    assert {value for value in held if isinstance(value, str | bytes)} == {"m", "tool", "system block"}


def test_an_unreadable_prompt_is_one_part() -> None:
    """Lists that are none, or too long."""
    for tools in ('"none"', "[" + ",".join(["{}"] * 600) + "]"):
        conversations = Conversations()
        conversations.send({**FIRST, "tools": json.loads(tools)})
        change = conversations.send({**NEXT, "tools": [tool("read")]})
        assert change is not None
        assert (change.cause, change.part) == (Cause.TOOLS, "tool 1")


def test_a_message_longer_than_its_length_can_tell_is_a_long_one() -> None:
    """Beyond 16 MiB the length is cut, and neither wraps around nor spills into the digest."""
    long = bytes(LENGTH + 1)
    add_messages(messages := array("Q"), PromptText(b"", (long,).__getitem__, 1, len(long)), 0, 1)
    (number,) = messages
    assert number & LENGTH == LENGTH
    assert number & DIGEST == digest_part(long) & DIGEST
