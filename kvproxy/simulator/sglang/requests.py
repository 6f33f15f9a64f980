"""From a prompt's token ids and a request body to what the engine runs, as SGLang reads it, and its errors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from kvproxy.simulator.engine_io import SimRequest
from kvproxy.simulator.generation import GenerationPlan
from kvproxy.simulator.http_call import HttpError
from kvproxy.simulator.sglang.radix_pages import hash_pages
from kvproxy.simulator.sglang.settings import SglangSettings
from kvproxy.simulator.tokenizer import Tokenizer


class SglangError(HttpError):
    """Becomes `{"object": "error", message, type, param, code}`."""

    def __init__(
        self, message: str, *, kind: str = "BadRequestError", param: str | None = None, code: int = 400
    ) -> None:
        super().__init__(code, flat_error(message, kind=kind, param=param, code=code))


def flat_error(message: str, *, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """The body; in a stream it is the value of `error`."""
    return {"object": "error", "message": message, "type": kind, "param": param, "code": code}


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A body of vLLM's shape in SGLang's."""
    error = nested["error"]
    return flat_error(error["message"], kind=error["type"], param=error["param"], code=error["code"])


def input_too_long(tokens: int, limit: int) -> SglangError:
    """400 for a prompt that does not fit the context."""
    return SglangError(f"The input ({tokens} tokens) is longer than the model's context length ({limit} tokens).")


def request_too_long(tokens: int, limit: int) -> SglangError:
    """400 for a prompt and an answer that together do not fit."""
    return SglangError(
        f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
        f"You requested a total of {tokens} tokens."
    )


def queue_full() -> SglangError:
    """503 with `--max-queued-requests`."""
    return SglangError("The request queue is full.", kind="SERVICE_UNAVAILABLE", code=503)


def engine_dead() -> SglangError:
    """500 once the scheduler is gone."""
    return SglangError("Internal server error", kind="InternalServerError", code=500)


_LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_new_tokens")


class SglangPlanner:
    """Checks a request and decides its answer. Any name of a model is its one model's; the same prompt always gets the
    same words."""

    def __init__(self, settings: SglangSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def plan(self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], plan_id: str) -> GenerationPlan:
        """The engine's requests, one a prompt and choice."""
        choices = body.get("n") or 1
        requests = tuple(
            self._request(body, prompt, f"{plan_id}-{next(self._numbers)}", choice)
            for prompt in prompts
            for choice in range(choices)
        )
        return GenerationPlan(
            id=plan_id,
            model=str(body.get("model") or self._settings.model),
            prompts=tuple(tuple(prompt) for prompt in prompts),
            requests=requests,
            stream=bool(body.get("stream")),
            max_tokens=max(request.output_tokens for request in requests),
            body=body,
        )

    def _request(self, body: Mapping[str, Any], prompt: Sequence[int], request_id: str, choice: int) -> SimRequest:
        output_tokens, reason = self._output_length(body, len(prompt))
        token_ids = (*prompt, *self._answer(prompt, choice, output_tokens))
        settings, salt = self._settings, body.get("cache_salt")
        hashes = hash_pages(token_ids, settings.page_size, paired=settings.paired, namespace=salt or "")
        return SimRequest(
            id=request_id,
            block_hashes=hashes,
            prompt_tokens=len(prompt),
            output_tokens=output_tokens,
            token_ids=token_ids,
            cache_salt=salt,
            finish_reason=reason,
            priority=self._priority(body),
        )

    def _priority(self, body: Mapping[str, Any]) -> int:
        """The scheduler's order is lowest first, SGLang's highest first unless told otherwise. Without its flag the
        field is of no effect."""
        given = body.get("priority")
        if given is None or not self._settings.enable_priority_scheduling:
            return 0
        if isinstance(given, bool) or not isinstance(given, int):
            raise SglangError("1 validation error: priority: Input should be a valid integer", param="priority")
        return given if self._settings.schedule_low_priority_values_first else -given

    def _answer(self, prompt: Sequence[int], choice: int, count: int) -> list[int]:
        seed = xxhash.xxh3_64_intdigest(repr(tuple(prompt)).encode(), seed=choice)
        return random.Random(seed).choices(self._tokenizer.slice_output_ids, k=count)

    def _output_length(self, body: Mapping[str, Any], prompt_tokens: int) -> tuple[int, str]:
        limit = min(self._settings.context_length, self._settings.max_total_num_tokens)
        if prompt_tokens == 0:
            raise SglangError("Prompt cannot be empty")
        if prompt_tokens >= limit:
            raise input_too_long(prompt_tokens, limit)
        asked = next((body[name] for name in _LENGTH_FIELDS if body.get(name) is not None), None)
        if asked is None:
            return min(self._settings.default_output_tokens, limit - prompt_tokens), "stop"
        if not isinstance(asked, int) or asked < 1:
            raise SglangError(f"max_new_tokens must be at least 1, got {asked}.")
        if prompt_tokens + asked > limit:
            raise request_too_long(prompt_tokens + asked, limit)
        return asked, "length"
