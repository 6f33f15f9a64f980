"""Sessions shaped as Claude Code, Codex and a chat client send them; their texts are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.real.engines.place import TINY
from tests.real.prompts import text

#: Words of each text; a word is about 2.5 tokens.
SYSTEM, SHARED_TOOL, ENVIRONMENT, QUESTION, RESULT, CHAT_SYSTEM, CHAT_QUESTION = 450, 25, 40, 25, 70, 120, 70
ANSWER_TOKENS = 4
_OF_A_PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
_OF_A_COMMAND = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}
_MARK = {"cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True)
class Request:
    """One request of a session, or of an agent that it started."""

    path: str
    body: dict[str, Any]
    turn: int
    agent: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Session:
    """One conversation; `next_turn` gives its requests, each after `answered` was called for the one before."""

    def __init__(self, number: int, *, turns: int) -> None:
        self.number = number
        self.turn = 0
        self._turns = turns
        self._seed = f"session {number}"
        self._rng = random.Random(number)

    @property
    def over(self) -> bool:
        return self.turn >= self._turns

    def next_turn(self) -> Iterator[Request]:
        raise NotImplementedError

    def answered(self, request: Request, document: Mapping[str, Any]) -> None:
        raise NotImplementedError


class ClaudeCode(Session):
    """A new billing header each time, marks on the last two messages of the user, tools, a sub-agent with a prompt of
    its own at every third turn and a fork of the session at every fourth."""

    def __init__(self, number: int, *, turns: int) -> None:
        super().__init__(number, turns=turns)
        self._messages: list[dict[str, Any]] = []
        self._agents: dict[str, list[dict[str, Any]]] = {}

    def next_turn(self) -> Iterator[Request]:
        self.turn += 1
        self._ask(self._messages, f"turn {self.turn}")
        yield self._request(self._messages, "")
        if self.turn % 3 == 0:
            agent = self._agents[f"sub-agent {self.turn}"] = []
            for step in range(2):
                self._ask(agent, f"agent {self.turn} {step}")
                yield self._request(agent, f"sub-agent {self.turn}")
        if self.turn % 4 == 0:
            fork = self._agents[f"fork {self.turn}"] = [*self._messages]
            self._ask(fork, f"fork {self.turn}")
            yield self._request(fork, f"fork {self.turn}")

    def answered(self, request: Request, document: Mapping[str, Any]) -> None:
        messages = self._agents[request.agent] if request.agent else self._messages
        said = "".join(block.get("text") or "" for block in document["content"])
        used = {"type": "tool_use", "id": f"toolu_{len(messages)}", "name": "tool_0", "input": {"path": "a.py"}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": said or "."}, used]})

    def _ask(self, messages: list[dict[str, Any]], what: str) -> None:
        content: list[dict[str, Any]] = []
        if messages and messages[-1]["role"] == "assistant":
            result = text(RESULT, seed=f"{self._seed} result {what}")
            id_ = messages[-1]["content"][-1]["id"]
            content.append({"type": "tool_result", "tool_use_id": id_, "content": [{"type": "text", "text": result}]})
        content.append({"type": "text", "text": text(QUESTION, seed=f"{self._seed} {what}")})
        messages.append({"role": "user", "content": content})

    def _request(self, messages: list[dict[str, Any]], agent: str) -> Request:
        sub = agent.startswith("sub-agent")
        cch = f"{self._rng.getrandbits(20):05x}"
        header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};"
        system = [
            {"type": "text", "text": header},
            {"type": "text", "text": text(SYSTEM, seed="sub-agent" if sub else "system"), **_MARK},
            {"type": "text", "text": text(ENVIRONMENT, seed=self._seed), **_MARK},
        ]
        tools = [
            {"name": f"tool_{one}", "description": text(SHARED_TOOL, seed=one), "input_schema": _OF_A_PATH}
            for one in range(3 if sub else 6)
        ]
        marked = [{**message, "content": [dict(block) for block in message["content"]]} for message in messages]
        for message in marked[-1::-2][:2]:
            message["content"][-1].update(_MARK)
        for message in marked[-5::-2]:  # where a mark has been, a single text is a string from then on
            if len(message["content"]) == 1:
                message["content"] = message["content"][0]["text"]
        body = {"model": TINY.name, "max_tokens": ANSWER_TOKENS, "system": system, "tools": tools, "messages": marked}
        headers = {"x-claude-code-session-id": self._seed.replace(" ", "-")}
        if agent:
            headers["x-claude-code-agent-id"] = f"{self.number}-{agent}".replace(" ", "-")
        return Request("/v1/messages", body, self.turn, agent, headers)


class Codex(Session):
    """The Responses API with all of the history in each request: calls of a shell, results, patches."""

    def __init__(self, number: int, *, turns: int) -> None:
        super().__init__(number, turns=turns)
        self._items: list[dict[str, Any]] = [self._message("developer", text(ENVIRONMENT, seed="permissions"))]
        self._items.append(self._message("user", text(ENVIRONMENT, seed=self._seed)))

    def next_turn(self) -> Iterator[Request]:
        self.turn += 1
        if self.turn > 1:
            self._items += self._called(f"call_{self.turn}")
        self._items.append(self._message("user", text(QUESTION, seed=f"{self._seed} turn {self.turn}")))
        shell = {"type": "function", "name": "shell", "parameters": _OF_A_COMMAND, "strict": False}
        patch = {"type": "custom", "name": "apply_patch"}
        body = {
            "model": TINY.name,
            "max_output_tokens": ANSWER_TOKENS,
            "instructions": text(SYSTEM, seed="instructions"),
            "tools": [{**tool, "description": text(SHARED_TOOL, seed=tool["name"])} for tool in (shell, patch)],
            "input": list(self._items),
            "store": False,
            "prompt_cache_key": self._seed,
            "parallel_tool_calls": False,
        }
        yield Request("/v1/responses", body, self.turn, headers={"thread-id": self._seed.replace(" ", "-")})

    def answered(self, request: Request, document: Mapping[str, Any]) -> None:
        self._items += [item for item in document["output"] if item["type"] == "message"]

    def _called(self, id_: str) -> list[dict[str, Any]]:
        """Return a call, every third one of the tool of free text, and its result."""
        result = text(RESULT, seed=f"{self._seed} {id_}")
        if self.turn % 3:
            call = {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls", "-l"]}'}
        else:
            call = {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"}
        return [{**call, "call_id": id_}, {"type": f"{call['type']}_output", "call_id": id_, "output": result}]

    @staticmethod
    def _message(role: str, said: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}


class Chat(Session):
    """A short system prompt for all, strings only."""

    def __init__(self, number: int, *, turns: int) -> None:
        super().__init__(number, turns=turns)
        self._messages = [{"role": "system", "content": text(CHAT_SYSTEM, seed="chat")}]

    def next_turn(self) -> Iterator[Request]:
        self.turn += 1
        self._messages.append({"role": "user", "content": text(CHAT_QUESTION, seed=f"{self._seed} turn {self.turn}")})
        body = {"model": TINY.name, "max_tokens": ANSWER_TOKENS, "messages": list(self._messages)}
        yield Request("/v1/chat/completions", body, self.turn)

    def answered(self, request: Request, document: Mapping[str, Any]) -> None:
        self._messages.append({"role": "assistant", "content": document["choices"][0]["message"]["content"] or "."})


CLIENTS: dict[str, Callable[..., Session]] = {"Claude Code": ClaudeCode, "Codex": Codex, "chat": Chat}
