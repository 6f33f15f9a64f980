"""Proof that a model's template continues half an answer: a finished greedy answer, continued from its middle, comes
out the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvproxy.base.errors import UpstreamError
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.resume.asked_once import AskedOnce

PATH = "/v1/chat/completions"
_TOKENS = 48
#: A model that ends its answer earlier shows too little.
_LEAST_CHARS = 40
_QUESTION = {
    "role": "user",
    "content": "Describe in three long sentences how rain comes to be and where its water goes.",
}
_word_ends = re.compile(r"(?<=\S)(?=\s)").finditer


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)


class Answer(msgspec.Struct):
    """Answer of a chat."""

    choices: list[_Choice] = []

    @property
    def text(self) -> str:
        """Its plain content."""
        return (self.choices[0].message.content or "") if self.choices else ""


def find_middle(text: str) -> int:
    """Return the end of the word nearest to the middle of a text; 0: it has none."""
    ends = [found.start() for found in _word_ends(text)]
    return min(ends, key=lambda end: abs(end - len(text) // 2), default=0)


def take_half(text: str) -> str:
    """Return the first half of an answer; "": it is too short to show anything."""
    return text[: find_middle(text)] if len(text) >= _LEAST_CHARS else ""


def ask_whole(model: str) -> Mapping[str, Any]:
    """Return the request for an answer."""
    return {"model": model, "messages": [_QUESTION], "temperature": 0, "max_tokens": _TOKENS}


def ask_rest(model: str, begun: str) -> Mapping[str, Any]:
    """Return the request for what follows the beginning of that answer."""
    messages = [_QUESTION, {"role": "assistant", "content": begun}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    return {**ask_whole(model), "messages": messages, "max_tokens": _TOKENS // 4, **continued}


class Proofs(AskedOnce[bool]):
    """Entered, it tries each model once, at its first stream on a route with `text`."""

    def is_proven(self, cluster: str, model: str, endpoint: Endpoint) -> bool:
        """Return whether the model was seen to continue its own answer."""
        return bool(self.look_up(f"{cluster}/{model}", self._try(model, endpoint)))

    async def _try(self, model: str, endpoint: Endpoint) -> bool | None:
        try:
            whole = await self._ask(endpoint, ask_whole(model))
            begun = take_half(whole)
            rest = await self._ask(endpoint, ask_rest(model, begun)) if begun else ""
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return bool(rest) and whole.startswith(begun + rest)

    async def _ask(self, endpoint: Endpoint, body: Mapping[str, Any]) -> str:
        asked = msgspec.json.encode(body)
        return msgspec.json.decode(await self.fetch(endpoint, b"POST", PATH.encode(), asked), type=Answer).text
