"""Events of streamed chat and text completions: what they add to an answer, and how those of a later engine read on."""

from __future__ import annotations

from typing import Any

import msgspec

from kvproxy.base.types import RequestKind
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.progress import START, Progress
from kvproxy.features.resume.splice import Splice

_ABSENT = msgspec.Raw()
_NO_CALLS = (b"", b"null", b"[]")
_REASONING = ("reasoning", "reasoning_content")


class _Call(msgspec.Struct, gc=False):
    id: str | None = None


_decode_calls = msgspec.json.Decoder(list[_Call]).decode


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT

    def calls(self) -> bool:
        """Return whether it is a part of a tool call."""
        return any(bytes(raw) not in _NO_CALLS for raw in (self.tool_calls, self.function_call))


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _ABSENT
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class OpenAiEvents:
    """Chat completions or text completions."""

    #: Text in the event that ends an answer.
    last = b'"finish_reason":"'
    final: tuple[bytes, ...] = ()  # `[DONE]` alone

    def __init__(self, kind: RequestKind) -> None:
        self._chat = kind is RequestKind.CHAT
        self._template: dict[str, Any] | None = None

    def read(self, data: bytes, progress: Progress) -> None:
        """Add a chunk of the first engine. Raises msgspec.DecodeError."""
        chunk = _decode(data)
        progress.head = progress.head or data
        if chunk.usage is not None:
            progress.prompt_tokens = chunk.usage.prompt_tokens
            progress.cached_details = chunk.usage.prompt_tokens_details or progress.cached_details
        _keep_prompt(progress, chunk.prompt_token_ids)
        for choice in chunk.choices:
            if choice.index:
                progress.obstacle = "n"
            _keep_prompt(progress, choice.prompt_token_ids)
            delta = choice.delta
            if delta is None:
                progress.add(choice.text or "", choice.token_ids)
            else:
                progress.role_sent = progress.role_sent or delta.role is not None
                if delta.reasoning or delta.reasoning_content:
                    progress.think(ids_known=bool(choice.token_ids))
                if delta.calls():
                    _note_calls(delta.tool_calls, progress)
                progress.add(delta.content or "", choice.token_ids)
            if choice.finish_reason is not None:
                progress.obstacle = progress.obstacle or "finished"

    def join(self, data: bytes, progress: Progress, splice: Splice) -> bytes:
        """Return the chunk of a later engine as one of the first one's stream; b"" if it has nothing new. Raises
        Mismatch and msgspec.DecodeError."""
        chunk = msgspec.json.decode(data, type=dict[str, Any])
        if self._template is None:
            self._template = self._make_template(chunk, progress)
        made = dict(self._template)
        self._keep_prompt_of(chunk, made, progress, splice)
        choices = [self._join_choice(choice, progress, splice) for choice in chunk.get("choices") or ()]
        if any(choice is not None and choice.get("finish_reason") is not None for choice in choices):
            progress.obstacle = progress.obstacle or "finished"
        made["choices"] = kept = [choice for choice in choices if choice is not None]
        if isinstance(chunk.get("usage"), dict):
            made["usage"] = splice.join_usage(chunk["usage"])
            if choices and not kept:
                return b""
        elif not kept:
            return b""
        return msgspec.json.encode(made)

    def _make_template(self, chunk: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Return the members that all chunks share: those of the first one, or of this one if there was none."""
        first: dict[str, Any] = msgspec.json.decode(progress.head) if progress.head else chunk
        own = ("choices", "usage", "prompt_token_ids", "prompt_text")
        return {name: value for name, value in first.items() if name not in own}

    def _join_choice(self, choice: dict[str, Any], progress: Progress, splice: Splice) -> dict[str, Any] | None:
        ids = choice.pop("token_ids", None)
        self._keep_prompt_of(choice, choice, progress, splice)
        ended = choice.get("finish_reason") is not None
        if not self._chat or (splice.plan.by_ids and not splice.plan.parsed):
            text = splice.take(choice.pop("text", None) or "", ids, last=ended)
            if self._chat:
                choice = {"index": 0, "delta": self._with_role({"content": text}, progress), **choice}
            else:
                choice = {"index": choice.pop("index", 0), "text": text, **choice}
            ids_come = self._add_ids(choice, progress, splice)
            return choice if text or ended or ids_come else None
        return self._join_chat(choice, ids, progress, splice, ended=ended)

    def _join_chat(
        self, choice: dict[str, Any], ids: list[int] | None, progress: Progress, splice: Splice, *, ended: bool
    ) -> dict[str, Any] | None:
        given = {} if splice.plan.spent else choice.get("delta") or {}
        delta = {name: value for name, value in given.items() if value not in (None, [])}
        reasons = any(delta.get(name) for name in _REASONING)
        if reasons and not (splice.plan.parsed or splice.plan.grade == "restart"):
            raise Mismatch("the engine takes the rest for reasoning")
        if reasons:
            progress.think(ids_known=bool(ids))
        delta["content"] = text = splice.take(delta.get("content") or "", ids, last=ended)
        if not text:
            del delta["content"]
        if "tool_calls" in delta:
            _note_calls(msgspec.json.encode(delta["tool_calls"]), progress)
        splice.began = splice.began or reasons or "tool_calls" in delta
        if delta.pop("role", None) is not None or not progress.role_sent:
            delta = self._with_role(delta, progress)
        choice["delta"] = delta
        return choice if self._add_ids(choice, progress, splice) or delta or ended else None

    def _keep_prompt_of(self, part: dict[str, Any], made: dict[str, Any], progress: Progress, splice: Splice) -> None:
        """Keep the prompt's ids where the leg is the whole request, and give them to a client who asked for them."""
        ids = part.pop("prompt_token_ids", None)
        if isinstance(ids, list) and not progress.prompt_ids and splice.plan.place == START:
            progress.prompt_ids = msgspec.json.encode(ids)
            if progress.ids_wanted:
                made["prompt_token_ids"] = ids

    def _add_ids(self, choice: dict[str, Any], progress: Progress, splice: Splice) -> bool:
        """Give the client the chunk's token ids, if it asked for any; return whether there are."""
        if progress.ids_wanted:
            choice["token_ids"] = splice.new_ids
        return progress.ids_wanted and bool(splice.new_ids)

    def _with_role(self, delta: dict[str, Any], progress: Progress) -> dict[str, Any]:
        if progress.role_sent:
            return delta
        progress.role_sent = True
        return {"role": "assistant", **delta}


def _note_calls(calls: msgspec.Raw | bytes, progress: Progress) -> None:
    progress.tools = True
    if calls:
        progress.call_ids += [call.id for call in _decode_calls(calls) if call.id is not None]


def _keep_prompt(progress: Progress, ids: msgspec.Raw) -> None:
    array = bytes(ids)
    if array.startswith(b"[") and array != b"[]":
        progress.prompt_ids = array
