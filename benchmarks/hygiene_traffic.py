"""Clients as they talk to engines, with and without habits that break prefixes, for `benchmarks.prefix_hygiene`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]

#: Lines of a system prompt, and the place of the one that some clients write anew.
SYSTEM_LINES, LIVELY_LINE = 40, 4
TOOLS = 10


def words(rng: random.Random, count: int) -> str:
    """Text that does not repeat."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(count))


@dataclass
class Dialogue:
    """One conversation in no API's shape: what it is about to send."""

    system: list[str]
    tools: list[tuple[str, str]]
    messages: list[tuple[str, str]]
    effort: str = "low"
    model: str = "sim"
    header: bool = False  # as Claude Code's

    @classmethod
    def begun(cls, rng: random.Random, *, lines: int = SYSTEM_LINES, header: bool = False) -> Dialogue:
        """With its first message."""
        system = [words(rng, 12) for _ in range(lines)]
        tools = [(f"tool_{number:02}", words(rng, 40)) for number in range(TOOLS)]
        return cls(system, tools, [("user", words(rng, 60))], header=header)

    def copy(self) -> Dialogue:
        """Another one with the same history."""
        return deepcopy(self)

    def go_on(self, rng: random.Random) -> None:
        """Add an answer, and the reply of the user or a tool."""
        self.messages += [("assistant", words(rng, 60)), ("user", words(rng, 60))]


# APIs


def as_messages(dialogue: Dialogue, rng: random.Random) -> Body:
    """Claude Code: a billing header that is another one each time, a mark on the last message."""
    system = [{"type": "text", "text": "\n".join(dialogue.system), "cache_control": {"type": "ephemeral"}}]
    if dialogue.header:
        header = f"x-anthropic-billing-header: cc_version=2.1.90; cc_entrypoint=cli; cch={rng.getrandbits(20):05x};"
        system.insert(0, {"type": "text", "text": header})
    messages: list[Body] = [{"role": role, "content": text} for role, text in dialogue.messages]
    marked = {"type": "text", "text": messages[-1]["content"], "cache_control": {"type": "ephemeral"}}
    messages[-1] = {"role": "user", "content": [marked]}
    tools = [
        {"name": name, "description": text, "input_schema": {"type": "object", "properties": {}}}
        for name, text in dialogue.tools
    ]
    return {"model": dialogue.model, "system": system, "tools": tools, "messages": messages, "max_tokens": 2}


def as_responses(dialogue: Dialogue, rng: random.Random) -> Body:
    """Codex."""
    items = [
        {"type": "message", "role": role,
         "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": text}]}
        for role, text in dialogue.messages
    ]  # fmt: skip
    tools = [
        {"type": "function", "name": name, "description": text, "parameters": {"type": "object", "properties": {}}}
        for name, text in dialogue.tools
    ]
    return {
        "model": dialogue.model, "instructions": "\n".join(dialogue.system), "input": items, "tools": tools,
        "max_output_tokens": 2, "store": False,
    }  # fmt: skip


def as_chat(dialogue: Dialogue, rng: random.Random) -> Body:
    """Return the body of a program with the `openai` package."""
    messages = [{"role": "system", "content": "\n".join(dialogue.system)}]
    messages += [{"role": role, "content": text} for role, text in dialogue.messages]
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}
        for name, text in dialogue.tools
    ]
    return {
        "model": dialogue.model, "messages": messages, "tools": tools, "max_tokens": 2,
        "reasoning_effort": dialogue.effort,
    }  # fmt: skip


@dataclass(frozen=True)
class Client:
    """Client: its body, path and headers."""

    name: str  # as metrics call it
    path: str
    body: Callable[[Dialogue, random.Random], Body]
    headers: Mapping[str, str]
    session_header: str
    agent_header: str = ""  # that tells sub-agents apart
    messages_before: int = 0  # in its list, before those of a dialogue

    def usage(self, answer: Body) -> tuple[int, int]:
        """Prompt tokens, and those of them that were cached."""
        usage = answer["usage"]
        if "prompt_tokens" in usage:
            return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if "cache_read_input_tokens" in usage or self.path == "/v1/messages":
            cached = usage.get("cache_read_input_tokens") or 0
            return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached
        return usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0


CLIENTS = (
    Client("claude-code", "/v1/messages", as_messages, {"user-agent": "claude-cli/2.1.90 (external, cli)"},
           "x-claude-code-session-id", "x-claude-code-agent-id"),
    Client("codex", "/v1/responses", as_responses, {"user-agent": "codex_cli_rs/0.50.0"}, "thread-id"),
    Client("openai-sdk", "/v1/chat/completions", as_chat, {"user-agent": "OpenAI/Python 2.1.0"}, "x-session-id",
           messages_before=1),
)  # fmt: skip


# habits


@dataclass(frozen=True)
class Habit:
    """Change that a client makes to its dialogue before it sends it in some turn, and its expected name. `at` is the
    number of a message, if it is one; `once`: in one turn only, and the dialogue stays so."""

    cause: str
    part: str
    change: Callable[[Dialogue, int, random.Random], None]
    once: bool = False
    at: int | None = None
    apis: frozenset[str] = field(default_factory=lambda: frozenset(client.path for client in CLIENTS))

    def is_named(self, client: Client, cause: str, part: str) -> bool:
        """Return True if a report names it. The client counts its messages; a range of lines must hold the changed
        one."""
        expected = self.part if self.at is None else f"message {self.at + client.messages_before}"
        if cause == "system" and (lines := re.fullmatch(r"system block 1, lines (\d+)-(\d+)", part)):
            return self.cause == cause and int(lines[1]) <= LIVELY_LINE <= int(lines[2])
        return (self.cause, expected) == (cause, part)


def _line(text: Callable[[int, random.Random], str]) -> Callable[[Dialogue, int, random.Random], None]:
    def change(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
        dialogue.system[LIVELY_LINE - 1] = text(turn, rng)

    return change


def _shuffled(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    dialogue.tools = dialogue.tools[turn % TOOLS :] + dialogue.tools[: turn % TOOLS]


def _more_tools(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    dialogue.tools.append((f"tool_{TOOLS + turn:02}", words(random.Random(turn), 40)))


def _effort(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    dialogue.effort = ("low", "high")[turn % 2]


def _model(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    dialogue.model = "sim-b"


def _rewritten(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    role, text = dialogue.messages[0]
    dialogue.messages[0] = (role, f"{words(rng, 20)} {text}")


def _dated(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    role, text = dialogue.messages[0]
    dialogue.messages[0] = (role, f"It is 12:{turn:02}. {text}")


def _kept_tail(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    dialogue.messages = [("user", words(rng, 40)), *dialogue.messages[-3:]]


def _summed_up(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    said = "This session is being continued from a previous conversation that ran out of context. "
    dialogue.messages = [("user", said + words(rng, 400))]


def _cleared(dialogue: Dialogue, turn: int, rng: random.Random) -> None:
    for index in (1, 3):
        dialogue.messages[index] = (dialogue.messages[index][0], "[cleared]")


_FIRST = f"system block 1, line {LIVELY_LINE}"
_CHAT = frozenset({"/v1/chat/completions"})
HABITS: dict[str, Habit] = {
    "header in the system prompt": Habit(
        "volatile_header", _FIRST, _line(lambda _, rng: f"x-client-header: v=1; h={rng.getrandbits(20):05x};")
    ),
    "token counter in the system prompt": Habit(
        "token_counter",
        _FIRST,
        _line(lambda turn, _: f"<total_tokens>{99999 - 4321 * turn} tokens left</total_tokens>"),
    ),
    "date in the system prompt": Habit("date_or_id", _FIRST, _line(lambda turn, _: f"Now: 2026-09-01 12:{turn:02}")),
    "id in the system prompt": Habit("date_or_id", _FIRST, _line(lambda _, rng: f"run {rng.getrandbits(128):032x}")),
    "system prompt rewritten": Habit("system", _FIRST, _line(lambda _, rng: words(rng, 12))),
    "tools in another order": Habit("tool_order", "tool 1", _shuffled),
    "a tool more": Habit("tools", f"tool {TOOLS + 1}", _more_tools),
    "template arguments": Habit("template", "template", _effort, apis=_CHAT),
    "message rewritten": Habit("message", "", _rewritten, at=1),
    "time in the first message": Habit("date_or_id", "", _dated, at=1),
    "compaction that keeps the last messages": Habit("compaction", "", _kept_tail, once=True, at=1),
    "compaction to a summary": Habit("compaction", "", _summed_up, once=True, at=1),
    "tool results cleared": Habit("compaction", "", _cleared, once=True, at=2),
    "another model": Habit("model_switch", "model", _model, once=True),
}
