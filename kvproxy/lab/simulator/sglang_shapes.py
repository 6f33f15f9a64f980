"""Answers in SGLang's JSON and SSE shapes: chat and text completions, Messages, and its own `/generate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvproxy.lab.simulator.generation import Answer, AnswerUsage, Delta
from kvproxy.lab.simulator.openai_shapes import DONE, format_event, format_typed_event, name_stop_reason

_METADATA = {"metadata": {"weight_version": "default"}}


class _OpenAi:
    """Common part of chat and text completions; `report` is `--enable-cache-report`."""

    object_name: str
    chunk_name: str

    def __init__(self, *, report: bool) -> None:
        self._report = report

    def build_body(self, answer: Answer) -> dict[str, Any]:
        choices = [self._whole(answer.read_choice(number)) for number in range(len(answer.plan.requests))]
        usage = self._usage(answer.count_usage())
        return {**_head(answer, self.object_name), "choices": choices, "usage": usage, **_METADATA}

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Events for what is new; `last` adds the end."""
        head = _head(answer, self.chunk_name)
        for delta in deltas:
            for choice in self._chunks(delta):
                yield format_event({**head, "choices": [choice], "usage": None})
        if last:
            if (answer.plan.body.get("stream_options") or {}).get("include_usage"):
                yield format_event({**head, "choices": [], "usage": self._usage(answer.count_usage())})
            yield DONE

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        yield format_event({"error": body})
        yield DONE

    def _whole(self, whole: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _usage(self, usage: AnswerUsage) -> dict[str, Any]:
        return {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if self._report else None,
            "reasoning_tokens": 0,
        }


class SglangChat(_OpenAi):
    """`/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _whole(self, whole: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text, "reasoning_content": None, "tool_calls": None}
        return {"index": whole.index, "message": message, **_ending(whole)}

    def _chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        empty = {"reasoning_content": None, "tool_calls": None}
        unended = {"logprobs": None, "finish_reason": None, "matched_stop": None}
        if delta.generated == len(delta.token_ids):
            yield {"index": delta.index, "delta": {"role": "assistant", "content": "", **empty}, **unended}
        yield {"index": delta.index, "delta": {"role": None, "content": delta.text, **empty}, **unended}
        if delta.finish_reason is not None:
            yield {"index": delta.index, "delta": {"role": None, "content": None, **empty}, **_ending(delta)}


class SglangCompletion(_OpenAi):
    """`/v1/completions`."""

    object_name = chunk_name = "text_completion"

    def _whole(self, whole: Delta) -> dict[str, Any]:
        return {"index": whole.index, "text": whole.text, **_ending(whole)}

    def _chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield {"index": delta.index, "text": delta.text, **_ending(delta)}


class SglangGenerate:
    """`/generate`: each event has the whole text so far, and every answer reports what was cached."""

    def build_body(self, answer: Answer) -> dict[str, Any]:
        """One prompt's answer."""
        whole = answer.read_choice(0)
        usage = answer.count_usage()
        reason = None if whole.finish_reason is None else {"type": whole.finish_reason, "length": whole.generated}
        return {
            "text": whole.text,
            "output_ids": list(whole.token_ids),
            "meta_info": {
                "id": answer.plan.id,
                "finish_reason": reason,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
        }

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Yield the same, again and again."""
        if deltas:
            yield format_event(self.build_body(answer))
        if last:
            yield DONE

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        yield format_event({"error": body})
        yield DONE


class SglangMessages:
    """`/v1/messages`; an instance serves one request. A stream names the prompt's tokens at its beginning alone, in a
    count that leaves out cached ones where they are reported at all."""

    def __init__(self, *, report: bool) -> None:
        self._report = report
        self._opened = False

    def build_body(self, answer: Answer) -> dict[str, Any]:
        whole = answer.read_choice(0)
        usage = {**self._input(answer), "output_tokens": answer.count_usage().completion_tokens}
        content = [{"type": "text", "text": whole.text}]
        return {**self._message(answer), "content": content, "stop_reason": name_stop_reason(whole), "usage": usage}

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Anthropic's sequence, and nothing behind it."""
        for delta in deltas:
            if not self._opened:
                self._opened = True
                usage = {**self._input(answer), "output_tokens": 0}
                yield format_typed_event(
                    "message_start", message={**self._message(answer), "content": [], "usage": usage}
                )
                yield format_typed_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            yield format_typed_event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        if last:
            stop = {"stop_reason": name_stop_reason(answer.read_choice(0))}
            yield format_typed_event("content_block_stop", index=0)
            usage = {"output_tokens": answer.count_usage().completion_tokens}
            yield format_typed_event("message_delta", delta=stop, usage=usage)
            yield format_typed_event("message_stop")

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        if self._opened:
            yield format_typed_event("content_block_stop", index=0)
        yield format_typed_event("error", error={"type": "api_error", "message": body["error"]["message"]})
        yield format_typed_event("message_stop")

    def _message(self, answer: Answer) -> dict[str, Any]:
        return {"id": f"msg_{answer.plan.id}", "type": "message", "role": "assistant", "model": answer.plan.model}

    def _input(self, answer: Answer) -> dict[str, int]:
        usage = answer.count_usage()
        cached = usage.cached_tokens if self._report else 0
        counts = {"input_tokens": usage.prompt_tokens - cached}
        return {**counts, "cache_read_input_tokens": cached} if cached else counts


def _head(answer: Answer, name: str) -> dict[str, Any]:
    return {"id": answer.plan.id, "object": name, "created": answer.created, "model": answer.plan.model}


def _ending(delta: Delta) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": delta.finish_reason, "matched_stop": None}
