"""Events of streamed Messages and Responses, which have a type each and open what they fill."""

from __future__ import annotations

from typing import Any

import msgspec

from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.progress import Progress
from kvproxy.features.resume.splice import Splice

_OPENERS = frozenset(
    {
        *("message_start", "content_block_start"),
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    }
)
#: Behind them no more text comes.
_CLOSERS = frozenset({"content_block_stop", "message_delta", "response.output_text.done"})
_PLACES = ("index", "output_index", "content_index")
#: Members of a response that are those of its first engine; the limit of a later one is less by what came.
_OF_FIRST = ("id", "created_at", "max_output_tokens")


class TypedEvents:
    """Common part: what the client has open already is not opened again. Nothing reports tokens before the end, so a
    piece of text counts as one."""

    last = b""
    final: tuple[bytes, ...] = ()

    def __init__(self) -> None:
        self._opened: set[tuple[object, ...]] = set()

    def read(self, data: bytes, progress: Progress) -> None:
        """Add an event of the first engine. Raises msgspec.DecodeError."""
        event = msgspec.json.decode(data, type=dict[str, Any])
        progress.head = progress.head or data
        self._is_open(event)
        self._note(event, progress)
        if text := self._text_of(event):
            progress.add(text, None)
        _note_end(event, progress)

    def join(self, data: bytes, progress: Progress, splice: Splice) -> bytes:
        """Return an event of a later engine as one of the first one's stream; b"" if it has nothing new. Raises
        Mismatch and msgspec.DecodeError."""
        event = msgspec.json.decode(data, type=dict[str, Any])
        if self._is_open(event):
            return b""
        before = progress.reasoned
        self._note(event, progress)
        if progress.reasoned and not before and splice.plan.grade != "restart":
            raise Mismatch("the engine takes the rest for reasoning")
        text = self._text_of(event)
        if text is not None:
            new = splice.take(text, None)
            if not new:
                return b""
            self._set_text(event, new)
        _note_end(event, progress)
        return msgspec.json.encode(self._adapt(event, progress, splice))

    def _is_open(self, event: dict[str, Any]) -> bool:
        """Return whether the client has this beginning already; note it."""
        if event.get("type") not in _OPENERS:
            return False
        place = (event["type"], *(event.get(name) for name in _PLACES))
        known = place in self._opened
        self._opened.add(place)
        return known

    def _note(self, event: dict[str, Any], progress: Progress) -> None:
        """Note tool calls, reasoning, and counts."""
        raise NotImplementedError

    def _text_of(self, event: dict[str, Any]) -> str | None:
        """Return the new text of an event; None if it is of another kind."""
        raise NotImplementedError

    def _set_text(self, event: dict[str, Any], text: str) -> None:
        raise NotImplementedError

    def _adapt(self, event: dict[str, Any], progress: Progress, splice: Splice) -> dict[str, Any]:
        """Return an event that goes to the client, with the first engine's names and the counts of both."""
        raise NotImplementedError


class MessagesEvents(TypedEvents):
    """Anthropic's messages."""

    last = b'"message_delta"'
    final: tuple[bytes, ...] = (b'"message_stop"',)

    def __init__(self) -> None:
        super().__init__()
        self._usage: dict[str, Any] = {}

    def _note(self, event: dict[str, Any], progress: Progress) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._usage = event.get("message", {}).get("usage") or {}
        elif kind == "content_block_start":
            block = event.get("content_block", {}).get("type")
            if block == "thinking":
                progress.think(ids_known=False)
            elif block != "text":
                progress.tools = True
            elif event.get("index"):
                progress.obstacle = progress.obstacle or "unusual"

    def _text_of(self, event: dict[str, Any]) -> str | None:
        delta = event.get("delta")
        if event.get("type") != "content_block_delta" or not isinstance(delta, dict):
            return None
        return delta.get("text") if delta.get("type") == "text_delta" else None

    def _set_text(self, event: dict[str, Any], text: str) -> None:
        event["delta"]["text"] = text

    def _adapt(self, event: dict[str, Any], progress: Progress, splice: Splice) -> dict[str, Any]:
        kind = event.get("type")
        if kind in ("content_block_stop", "message_delta"):  # before a tool call, too
            splice.take("", None, last=True)
        if kind != "message_delta":
            return event
        usage = event.get("usage") or {}
        output = splice.count_output(usage.get("output_tokens"))
        first = {name: count for name, count in self._usage.items() if name != "output_tokens"}
        return {**event, "usage": {**(usage if splice.plan.grade == "restart" else first), "output_tokens": output}}


class ResponsesEvents(TypedEvents):
    """OpenAI's responses."""

    last = b'"response.completed"'
    final: tuple[bytes, ...] = (b'"response.completed"', b'"response.incomplete"')

    def __init__(self) -> None:
        super().__init__()
        self._number = -1  # of the last event
        self._response: dict[str, Any] = {}  # identity of the first one
        self._items: dict[object, Any] = {}  # ids by output index

    def read(self, data: bytes, progress: Progress) -> None:
        """As of TypedEvents; the client gets the first engine's numbers and names."""
        super().read(data, progress)
        self._number = max(self._number, msgspec.json.decode(data).get("sequence_number") or 0)

    def _note(self, event: dict[str, Any], progress: Progress) -> None:
        kind = event.get("type")
        if kind == "response.created" and not self._response:
            response = event.get("response") or {}
            self._response = {name: response[name] for name in _OF_FIRST if name in response}
        elif kind == "response.output_item.added":
            item = event.get("item") or {}
            self._items.setdefault(event.get("output_index"), item.get("id"))
            if item.get("type") == "reasoning":
                progress.think(ids_known=False)
            elif item.get("type") != "message":
                progress.tools = True

    def _text_of(self, event: dict[str, Any]) -> str | None:
        return event.get("delta") if event.get("type") == "response.output_text.delta" else None

    def _set_text(self, event: dict[str, Any], text: str) -> None:
        event["delta"] = text

    def _adapt(self, event: dict[str, Any], progress: Progress, splice: Splice) -> dict[str, Any]:
        self._number += 1
        event["sequence_number"] = self._number
        place = event.get("output_index")
        whole = progress.text
        if "item_id" in event:
            event["item_id"] = self._items.get(place) or event["item_id"]
        if event.get("type") == "response.output_text.done":
            splice.take("", None, last=True)
            event["text"] = whole
        if event.get("type") == "response.content_part.done":
            _fill(event.get("part"), whole)
        if event.get("type") == "response.output_item.done":
            self._fill_item(event.get("item"), place, whole)
        if isinstance(response := event.get("response"), dict):
            response |= self._response
            for index, item in enumerate(response.get("output") or ()):
                self._fill_item(item, index, whole)
            if isinstance(usage := response.get("usage"), dict):
                response["usage"] = _join_usage(usage, splice)
        return event

    def _fill_item(self, item: Any, index: object, text: str) -> None:
        if isinstance(item, dict) and item.get("type") == "message":
            item["id"] = self._items.get(index) or item.get("id")
            for part in item.get("content") or ():
                _fill(part, text)


def _note_end(event: dict[str, Any], progress: Progress) -> None:
    kind = event.get("type")
    if kind in _CLOSERS and not (kind == "content_block_stop" and progress.thinking):  # else a block of it ended
        progress.obstacle = progress.obstacle or "finished"


def _fill(part: Any, text: str) -> None:
    if isinstance(part, dict) and part.get("type") == "output_text":
        part["text"] = text


def _join_usage(usage: dict[str, Any], splice: Splice) -> dict[str, Any]:
    output = splice.count_output(usage.get("output_tokens"))
    prompt = splice.count_prompt(usage.get("input_tokens"))
    joined = {**usage, "input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
    if splice.plan.grade != "restart" and isinstance(details := usage.get("input_tokens_details"), dict):
        joined["input_tokens_details"] = {**details, "cached_tokens": 0}
    return joined
