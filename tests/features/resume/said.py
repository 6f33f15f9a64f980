"""Streamed chats with reasoning and tool calls, as clients put them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Said:
    """One answer as a client puts it together."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    roles: int = 0
    finishes: list[str] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Add a chunk."""
        delta = choice["delta"]
        self.roles += "role" in delta
        self.reasoning += delta.get("reasoning") or ""
        self.content += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(self.calls)
                self.names.append(call["id"])
                self.calls.append({"name": call["function"]["name"], "arguments": ""})
            self.calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
        if choice["finish_reason"]:
            self.finishes.append(choice["finish_reason"])

    @property
    def all(self) -> tuple[Any, ...]:
        """All but the names that an engine draws."""
        return self.reasoning, self.content, self.calls, self.roles, self.finishes
