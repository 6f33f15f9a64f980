"""`/v1/messages` in the shapes vLLM answers Anthropic's API with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvproxy.simulator.answer import Answer, Delta
from kvproxy.simulator.http_call import encode_json
from kvproxy.simulator.openai_shapes import DONE


class AnthropicShape:
    """One message; an instance serves one request."""

    def __init__(self) -> None:
        self._opened = False

    def build_body(self, answer: Answer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        whole = answer.read_choice(0)
        return {
            "id": f"chatcmpl-{answer.plan.id}",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": whole.text}],
            "model": answer.plan.model,
            "stop_reason": _stop_reason(whole),
            "usage": self._usage(answer),
        }

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Anthropic's event sequence, and vLLM's [DONE] behind it."""
        for delta in deltas:
            if not self._opened:
                self._opened = True
                yield from self._opening(answer)
            text = {"type": "text_delta", "text": delta.text}
            yield _event("content_block_delta", {"index": 0, "delta": text})
        if last:
            yield _event("content_block_stop", {"index": 0})
            stop = {"stop_reason": _stop_reason(answer.read_choice(0))}
            yield _event("message_delta", {"delta": stop, "usage": self._usage(answer)})
            yield _event("message_stop", {})
            yield DONE

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """A failure in mid-stream."""
        yield _event("error", {"error": {"type": "internal_error", "message": body["error"]["message"]}})
        yield DONE

    def _opening(self, answer: Answer) -> Iterator[bytes]:
        usage = {"input_tokens": answer.count_usage().prompt_tokens, "output_tokens": 0}
        message = {**self.build_body(answer), "content": [], "stop_reason": None, "usage": usage}
        yield _event("message_start", {"message": message})
        yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})

    def _usage(self, answer: Answer) -> dict[str, int]:
        """`input_tokens` is what was neither read from the cache nor written to it."""
        usage = answer.count_usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.created_cache_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_creation_input_tokens": usage.created_cache_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
        }


def _stop_reason(whole: Delta) -> str:
    return "max_tokens" if whole.finish_reason == "length" else "end_turn"


def _event(kind: str, body: dict[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + encode_json({"type": kind, **body}) + b"\n\n"
