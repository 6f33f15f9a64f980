"""Messages whose rest is a chat: engines begin a new turn behind half a message, and continue half a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import msgspec

from kvproxy.base.installed import installed
from kvproxy.base.types import RequestKind
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.clients.vllm import ChatForm
from kvproxy.cache.engines import Engines
from kvproxy.cache.feature import CacheFeature, find_chat_form
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.events import DONE, read_data
from kvproxy.features.resume.mismatch import Mismatch

#: Bound on the question for an engine's kind, asked once: engines that take over many streams are late.
_TIMEOUT_S = 60.0
_REASONING = ("reasoning", "reasoning_content")
#: How messages name it. Other ends, such as `abort` and `error`, are those of answers that are not whole.
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class ChatForms:
    """Makes of a message the chat that SGLang (`forms[True]`) and other engines make of it. Entered, it finds out which
    one an engine is."""

    def __init__(self, pool: UpstreamPool) -> None:
        forms = {of: find_chat_form(installed(CacheFeature), RequestKind.MESSAGES, of) for of in (False, True)}
        self.forms: Mapping[bool, ChatForm] = {of: form for of, form in forms.items() if form is not None}
        self._engines = Engines(pool, timeout_s=_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engines.__aexit__()

    async def is_sglang(self, pick: Pick) -> bool:
        """Return whether the engine is SGLang. Raises ClientError."""
        return await self._engines.client(pick.endpoint.engine).is_sglang()


class MessageOfChat:
    """Events of a message, of those of the chat that goes on behind its first text; as vLLM 0.32 makes them."""

    def __init__(self) -> None:
        self._index = 0  # of the content block that is open
        self._block = "text"
        self._waiting: list[str] = []  # text that came within a call
        self._call: object = None  # index of the one that is open
        self._finish: object = None  # as the chat names it
        self._matched: object = None  # a stop string, or the number of an end token
        self._tokens: object = None  # of the leg's answer
        self._failed = False  # nothing that follows is part of the message

    def convert(self, events: Sequence[bytes]) -> list[bytes]:
        """Return the message's events. Raises Mismatch."""
        try:
            return [_as_event(made) for event in events if (data := read_data(event)) for made in self._convert(data)]
        except (AttributeError, TypeError):  # members that have another type than in the API
            raise Mismatch("its events cannot be read") from None

    def _convert(self, data: bytes) -> Iterator[dict[str, Any]]:
        if self._failed:
            return
        if data == DONE:
            yield from self._end()
            return
        try:
            chunk = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Mismatch("its events cannot be read") from None
        if (error := chunk.get("error")) is not None:
            yield self._fail(error)
            return
        self._tokens = (chunk.get("usage") or {}).get("completion_tokens", self._tokens)
        for choice in chunk.get("choices") or ():
            self._note_end(choice)
            yield from self._add(choice.get("delta") or {})

    def _fail(self, error: object) -> dict[str, Any]:
        self._failed = True
        return {"type": "error", "error": error}

    def _add(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if any(delta.get(name) for name in _REASONING):
            raise Mismatch("the engine takes the rest for reasoning")
        if text := delta.get("content"):
            yield from self._add_text(text)
        for call in delta.get("tool_calls") or ():
            yield from self._add_call(call)

    def _add_text(self, text: str) -> Iterator[dict[str, Any]]:
        if self._block == "text":
            yield self._delta(type="text_delta", text=text)
        else:
            self._waiting.append(text)

    def _add_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        function = call.get("function") or {}
        place = call.get("index") or 0
        if place != self._call and function.get("name"):
            yield from self._close()
            self._call = place
            id_ = call.get("id") or ""
            yield self._open({"type": "tool_use", "id": id_, "name": function["name"], "input": {}})
        if function.get("arguments") and place == self._call:
            yield self._delta(type="input_json_delta", partial_json=function["arguments"])

    def _note_end(self, choice: dict[str, Any]) -> None:
        if (finish := choice.get("finish_reason")) is not None:
            self._finish = finish
            self._matched = choice.get("stop_reason") or choice.get("matched_stop")

    def _end(self) -> Iterator[dict[str, Any]]:
        reason = _ENDS.get(self._finish) if isinstance(self._finish, str) else None
        if reason is None:
            yield self._fail({"type": "api_error", "message": "the engine ended its answer early", "code": 500})
            return
        sequence = self._matched if self._finish == "stop" and isinstance(self._matched, str) else None
        end = {"stop_reason": reason if sequence is None else "stop_sequence", "stop_sequence": sequence}
        yield from self._close()
        yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": self._tokens}}
        yield {"type": "message_stop"}

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the open block, and give the text that waited for it a block of its own."""
        yield {"type": "content_block_stop", "index": self._index}
        if self._waiting:
            yield self._open({"type": "text", "text": ""})
            yield self._delta(type="text_delta", text="".join(self._waiting))
            self._waiting = []
            yield {"type": "content_block_stop", "index": self._index}

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._index += 1
        self._block = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, **delta: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _as_event(made: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (made["type"].encode(), msgspec.json.encode(made))
