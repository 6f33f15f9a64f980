"""`/v1/responses` and `/v1/messages` in vLLM's shapes: the APIs whose streams are typed events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvproxy.lab.simulator.generation import Answer, Delta
from kvproxy.lab.simulator.openai_shapes import DONE, format_event, format_typed_event, name_stop_reason


class ResponsesShape:
    """One response; an instance serves one request, since events are numbered."""

    def __init__(self) -> None:
        self._number = 0

    def build_body(self, answer: Answer) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, and of the last event of one that is."""
        body = answer.plan.body
        whole = answer.read_choice(0)
        done = whole.finish_reason is not None
        cut = whole.finish_reason == "length"
        running = "in_progress" if not done else "incomplete" if cut else "completed"
        return {
            "id": f"resp_{answer.plan.id}",
            "created_at": answer.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": answer.plan.model,
            "object": "response",
            "output": [self._item(answer, whole.text, "completed")] if done else [],
            "parallel_tool_calls": True,
            "temperature": float(body.get("temperature", 1.0)),
            "tool_choice": body.get("tool_choice", "auto") if body.get("tools") else "none",
            "tools": body.get("tools") or [],
            "top_p": float(body.get("top_p", 1.0)),
            "background": False,
            "max_output_tokens": answer.plan.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": running,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": self._usage(answer) if done else None,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Events for new tokens, with what opens the response before the first and what closes it after the last."""
        place = {"item_id": f"msg_{answer.plan.id}", "output_index": 0, "content_index": 0}
        for delta in deltas:
            if self._number == 0:
                yield from self._opening(answer, place)
            yield self._event("response.output_text.delta", {**place, "delta": delta.text, "logprobs": []})
        if last:
            yield from self._closing(answer, place)

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """Yield a failure in mid-stream."""
        yield self._event("error", body)

    def _opening(self, answer: Answer, place: dict[str, Any]) -> Iterator[bytes]:
        started = {**self.build_body(answer), "status": "in_progress", "output": [], "usage": None}
        started["incomplete_details"] = None
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": started})
        item = {**self._item(answer, "", "in_progress"), "content": []}
        yield self._event("response.output_item.added", {"item": item, "output_index": 0})
        yield self._event("response.content_part.added", {**place, "part": {**_text(""), "logprobs": []}})

    def _closing(self, answer: Answer, place: dict[str, Any]) -> Iterator[bytes]:
        text = answer.read_choice(0).text
        yield self._event("response.output_text.done", {**place, "logprobs": [], "text": text})
        yield self._event("response.content_part.done", {**place, "part": _text(text)})
        item = self._item(answer, text, "completed")
        yield self._event("response.output_item.done", {"item": item, "output_index": 0})
        yield self._event("response.completed", {"response": self.build_body(answer)})

    def _event(self, kind: str, body: dict[str, Any]) -> bytes:
        numbered = {**body, "sequence_number": self._number, "type": kind}
        self._number += 1
        return f"event: {kind}\n".encode() + format_event(numbered)

    def _item(self, answer: Answer, text: str, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{answer.plan.id}",
            "content": [_text(text)],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        usage = answer.count_usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _text(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


class AnthropicShape:
    """One message; an instance serves one request."""

    def __init__(self) -> None:
        self._opened = False

    def build_body(self, answer: Answer) -> dict[str, Any]:
        whole = answer.read_choice(0)
        return {
            "id": f"chatcmpl-{answer.plan.id}",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": whole.text}],
            "model": answer.plan.model,
            "stop_reason": name_stop_reason(whole),
            "usage": self._usage(answer),
        }

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Anthropic's event sequence, and vLLM's [DONE] behind it."""
        for delta in deltas:
            if not self._opened:
                self._opened = True
                yield from self._opening(answer)
            text = {"type": "text_delta", "text": delta.text}
            yield format_typed_event("content_block_delta", index=0, delta=text)
        if last:
            yield format_typed_event("content_block_stop", index=0)
            stop = {"stop_reason": name_stop_reason(answer.read_choice(0))}
            yield format_typed_event("message_delta", delta=stop, usage=self._usage(answer))
            yield format_typed_event("message_stop")
            yield DONE

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """Yield a failure in mid-stream."""
        yield format_typed_event("error", error={"type": "internal_error", "message": body["error"]["message"]})
        yield DONE

    def _opening(self, answer: Answer) -> Iterator[bytes]:
        usage = {"input_tokens": answer.count_usage().prompt_tokens, "output_tokens": 0}
        message = {**self.build_body(answer), "content": [], "stop_reason": None, "usage": usage}
        yield format_typed_event("message_start", message=message)
        yield format_typed_event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def _usage(self, answer: Answer) -> dict[str, int]:
        """`input_tokens` is what was neither read from the cache nor written to it."""
        usage = answer.count_usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.created_cache_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_creation_input_tokens": usage.created_cache_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
        }
