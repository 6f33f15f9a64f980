"""Chat and text completions in the JSON and SSE shapes vLLM gives them, key by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from kvproxy.lab.simulator.generation import Answer, AnswerUsage, Delta
from kvproxy.lab.simulator.json_app import encode_json

DONE = b"data: [DONE]\n\n"


def format_event(body: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + encode_json(body) + b"\n\n"


def format_typed_event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + format_event({"type": kind, **fields})


def name_stop_reason(whole: Delta) -> str:
    """Return the end of an answer in the words of `/v1/messages`."""
    return "max_tokens" if whole.finish_reason == "length" else "end_turn"


class OpenAiShape(ABC):
    """Common part of chat and text completions; `details` shows whether usage names the cached tokens."""

    object_name: str
    id_prefix: str

    def __init__(self, *, details: bool, fingerprint: str) -> None:
        self._details = details
        self._fingerprint = fingerprint

    def usage(self, usage: AnswerUsage) -> dict[str, Any]:
        """Return the usage object of a complete answer."""
        return {
            **count_totals(usage),
            "prompt_tokens_details": self._full_details(usage),
            "completion_tokens_details": None,
        }

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Events for new tokens; `last` adds what ends the stream."""
        options = answer.plan.body.get("stream_options") or {}
        for delta in deltas:
            yield from self.build_delta_events(answer, delta, continuous=bool(options.get("continuous_usage_stats")))
        if last:
            if options.get("include_usage"):
                usage = {**count_totals(answer.count_usage()), **self._stream_details(answer.count_usage())}
                yield format_event(
                    {**self._head(answer), "choices": [], "usage": usage, "system_fingerprint": self._fingerprint}
                )
            yield DONE

    @abstractmethod
    def build_delta_events(self, answer: Answer, delta: Delta, *, continuous: bool) -> Iterator[bytes]:
        """Yield the events of one choice's new tokens."""

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """How a stream ends when the engine dies under it: cleanly, with an error in it."""
        yield format_event(body)
        yield DONE

    def _head(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}{answer.plan.id}",
            "object": self.object_name,
            "created": answer.created,
            "model": answer.plan.model,
        }

    def _tail(self, answer: Answer, delta: Delta, *, continuous: bool) -> dict[str, Any]:
        tail: dict[str, Any] = {}
        if continuous:
            tail["usage"] = _running_usage(answer.plan.prompt_tokens, delta.generated)
        wants_usage = (answer.plan.body.get("stream_options") or {}).get("include_usage")
        if delta.finish_reason is not None and not wants_usage:
            tail["system_fingerprint"] = self._fingerprint
        return tail

    def _created(self, usage: AnswerUsage) -> int | None:
        return usage.created_cache_tokens

    def _full_details(self, usage: AnswerUsage) -> dict[str, Any] | None:
        if not self._details:
            return None
        created = self._created(usage)
        media = dict(usage.media_tokens) or None
        return {"cached_tokens": usage.cached_tokens, "created_cache_tokens": created, "multimodal_tokens": media}

    def _stream_details(self, usage: AnswerUsage) -> dict[str, Any]:
        if not self._details:
            return {}
        created = self._created(usage)
        known: dict[str, Any] = {} if created is None else {"created_cache_tokens": created}
        if usage.media_tokens:
            known["multimodal_tokens"] = dict(usage.media_tokens)
        return {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **known}}


class ChatShape(OpenAiShape):
    """`/v1/chat/completions`."""

    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def build_body(self, answer: Answer) -> dict[str, Any]:
        ids = answer.plan.body.get("return_token_ids")
        return {
            **self._head(answer),
            "object": "chat.completion",
            "choices": [self._choice(answer.read_choice(n), bool(ids)) for n in range(len(answer.plan.requests))],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self.usage(answer.count_usage()),
            "prompt_logprobs": None,
            "prompt_token_ids": answer.plan.prompts[0] if ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def build_delta_events(self, answer: Answer, delta: Delta, *, continuous: bool) -> Iterator[bytes]:
        """Yield the role first, with the first token; then the text."""
        ids = answer.plan.body.get("return_token_ids")
        if delta.generated == len(delta.token_ids):
            yield self._role_event(answer, delta, continuous=continuous)
        choice = self.read_delta(answer, delta)
        if delta.finish_reason is not None:
            choice["stop_reason"] = None
        choice["token_ids"] = delta.token_ids if ids else None
        yield format_event(
            {**self._head(answer), "choices": [choice], **self._tail(answer, delta, continuous=continuous)}
        )

    def read_delta(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        """Return the beginning of the choice that the new tokens are."""
        added = {"content": delta.text}
        return {"index": delta.index, "delta": added, "logprobs": None, "finish_reason": delta.finish_reason}

    def _role_event(self, answer: Answer, delta: Delta, *, continuous: bool) -> bytes:
        role = {"role": "assistant", "content": ""}
        choice = {"index": delta.index, "delta": role, "logprobs": None, "finish_reason": None}
        body = {**self._head(answer), "choices": [choice]}
        if continuous:
            body["usage"] = _running_usage(answer.plan.prompt_tokens, 0)
        ids = answer.plan.body.get("return_token_ids")
        return format_event({**body, "prompt_token_ids": answer.plan.prompts[0] if ids else None, "prompt_text": None})

    def _choice(self, whole: Delta, ids: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.text}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {
            "index": whole.index,
            "message": message,
            "logprobs": None,
            "finish_reason": whole.finish_reason,
            "stop_reason": None,
            "token_ids": whole.token_ids if ids else None,
            "routed_experts": None,
        }


class CompletionShape(OpenAiShape):
    """`/v1/completions`."""

    object_name = "text_completion"
    id_prefix = "cmpl-"

    def build_body(self, answer: Answer) -> dict[str, Any]:
        choices = range(len(answer.plan.requests))
        return {
            **self._head(answer),
            "choices": [self._choice(answer, answer.read_choice(number)) for number in choices],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self.usage(answer.count_usage()),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def build_delta_events(self, answer: Answer, delta: Delta, *, continuous: bool) -> Iterator[bytes]:
        """One event, without a role."""
        ids = answer.plan.body.get("return_token_ids")
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": self._prompt_ids(answer, delta) if delta.generated == len(delta.token_ids) else None,
            "token_ids": delta.token_ids if ids else None,
        }
        yield format_event(
            {**self._head(answer), "choices": [choice], **self._tail(answer, delta, continuous=continuous)}
        )

    def _choice(self, answer: Answer, whole: Delta) -> dict[str, Any]:
        ids = answer.plan.body.get("return_token_ids")
        return {
            "index": whole.index,
            "text": whole.text,
            "logprobs": None,
            "finish_reason": whole.finish_reason,
            "stop_reason": None,
            "token_ids": whole.token_ids if ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(answer, whole),
            "routed_experts": None,
        }

    def _prompt_ids(self, answer: Answer, delta: Delta) -> tuple[int, ...] | None:
        if not answer.plan.body.get("return_token_ids"):
            return None
        choices = len(answer.plan.requests) // len(answer.plan.prompts)
        return answer.plan.prompts[delta.index // choices]

    def _created(self, usage: AnswerUsage) -> int | None:
        return None  # vLLM fills it for chats only


def count_totals(usage: AnswerUsage) -> dict[str, Any]:
    """Return the tokens of prompt and answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _running_usage(prompt_tokens: int, generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens": generated,
        "completion_tokens_details": None,
    }
