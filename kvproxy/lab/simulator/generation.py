"""A generation between HTTP and the engine: what a body asks the engine for, and what has come of it so far."""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from kvproxy.lab.simulator.engine_io import Scheduling, SimRequest
from kvproxy.lab.simulator.engine_runner import GenerationGroup
from kvproxy.lab.simulator.media import count_by_kind, media_of
from kvproxy.lab.simulator.tokenizer import Tokenizer, hash_blocks
from kvproxy.lab.simulator.vllm_errors import (
    VllmError,
    bad_parameter,
    model_not_found,
    no_integer,
    priority_not_enabled,
    prompt_too_long,
    request_too_long,
)
from kvproxy.lab.simulator.vllm_settings import VllmSettings

_LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One client request: its sequences (choices x prompts), and how the answer is wanted."""

    id: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[SimRequest, ...]
    stream: bool
    max_tokens: int
    body: Mapping[str, Any]
    remote_cached_tokens: int | None = None  # counted by the engine that computed the prompt

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts, each counted once however many choices it has."""
        return sum(len(prompt) for prompt in self.prompts)

    def slice_output_ids(self, index: int, first: int, last: int) -> Sequence[int]:
        """Tokens `first` up to, not including, `last` of choice `index`'s answer."""
        request = self.requests[index]
        start = request.prompt_tokens
        return request.token_ids[start + first : start + last]


class Planner:
    """Checks a request as vLLM does and decides its answer: the same prompt always gets the same words."""

    def __init__(self, settings: VllmSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def check_model(self, body: Mapping[str, Any]) -> str:
        """Return the model's name; a request without one means the base model."""
        model = body.get("model") or self._settings.model
        if model not in self._settings.models:
            raise model_not_found(str(model), self._settings.models)
        return str(model)

    def plan(self, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], plan_id: str) -> GenerationPlan:
        """Return the engine's requests for `parse_body`, one a prompt and choice."""
        model = self.check_model(body)
        self._check_sampling(body)
        choices = body.get("n") or 1
        requests: list[SimRequest] = []
        for prompt in prompts:
            for choice in range(choices):
                name = f"{plan_id}-{next(self._numbers)}"  # a client may reuse its id
                requests.append(self._request(body, model, prompt, name, choice))
        return GenerationPlan(
            id=plan_id,
            model=model,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            requests=tuple(requests),
            stream=bool(body.get("stream")),
            max_tokens=max(request.output_tokens for request in requests),
            body=body,
        )

    def answer_by(self, plan: GenerationPlan, seen: Sequence[int], cached_tokens: int) -> GenerationPlan:
        """Return the plan of a request whose prompt was pulled: the answer is the one to the prompt whose KV came."""
        request = plan.requests[0]
        answer, _ = self.answer(seen, 0, request.output_tokens, "")
        prompt = plan.prompts[0]
        request = replace(request, token_ids=(*prompt, *answer), pulled_tokens=len(prompt))
        return replace(plan, requests=(request,), remote_cached_tokens=cached_tokens)

    def _request(
        self, body: Mapping[str, Any], model: str, prompt: Sequence[int], request_id: str, choice: int
    ) -> SimRequest:
        limit, reason = self._output_length(body, len(prompt))
        answer, reason = self.answer(prompt, choice, limit, reason)
        token_ids = (*prompt, *answer)
        lora = model if model in self._settings.loras else None
        salt = body.get("cache_salt")
        return SimRequest(
            id=request_id,
            block_hashes=hash_blocks(
                token_ids, self._settings.engine.block_size, lora=lora, salt=salt, media=media_of(prompt)
            ),
            prompt_tokens=len(prompt),
            output_tokens=len(answer),
            token_ids=token_ids,
            lora_id=None if lora is None else self._settings.loras.index(lora) + 1,
            lora_name=lora,
            cache_salt=salt,
            finish_reason=reason,
            priority=self._priority(body),
            media=media_of(prompt),
        )

    def _priority(self, body: Mapping[str, Any]) -> int:
        given = body.get("priority", 0)
        try:
            if isinstance(given, bool) or int(given) != float(given):
                raise ValueError
        except (TypeError, ValueError):
            raise no_integer("priority", given) from None
        priority = int(given)
        if priority and self._settings.refuse_priority and self._settings.engine.scheduling is Scheduling.FCFS:
            raise priority_not_enabled(priority)
        return priority

    def answer(self, prompt: Sequence[int], choice: int, count: int, reason: str) -> tuple[list[int], str]:
        """Return so many tokens, and the reason why they end. Each follows from all before it, so that an answer may go
        on elsewhere from any place."""
        words = self._tokenizer.slice_output_ids
        before = xxhash.xxh3_64(array("q", prompt).tobytes(), seed=choice)
        answer = []
        for _ in range(count):
            token = words[before.intdigest() % len(words)]
            answer.append(token)
            before.update(token.to_bytes(8, sys.byteorder))
        return answer, reason

    def _output_length(self, body: Mapping[str, Any], prompt_tokens: int) -> tuple[int, str]:
        limit = self._settings.context_tokens
        if prompt_tokens >= limit:
            raise prompt_too_long(prompt_tokens, limit)
        if prompt_tokens == 0:
            raise VllmError("The decoder prompt cannot be empty")
        asked = next((body[name] for name in _LENGTH_FIELDS if body.get(name) is not None), None)
        if asked is None:
            return min(self._settings.default_output_tokens, limit - prompt_tokens), "stop"
        if not isinstance(asked, int) or asked < 1:
            raise bad_parameter("max_tokens", asked, f"max_tokens must be at least 1, got {asked}.")
        if asked > limit:
            complaint = f"max_tokens={asked} cannot be greater than max_model_len={limit}."
            raise bad_parameter("max_tokens", asked, f"{complaint} Please request fewer output tokens.")
        if prompt_tokens + asked > limit:
            raise request_too_long(prompt_tokens, asked, limit)
        return asked, "length"

    def _check_sampling(self, body: Mapping[str, Any]) -> None:
        temperature = body.get("temperature")
        if isinstance(temperature, int | float) and temperature < 0:
            shown = float(temperature)
            raise bad_parameter("temperature", shown, f"temperature must be non-negative, got {shown}.")
        choices = body.get("n")
        if choices is not None and (not isinstance(choices, int) or choices < 1):
            raise bad_parameter("n", choices, f"n must be at least 1, got {choices}.")


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one client request; `created_cache_tokens` is what its prompt added to the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int
    media_tokens: Mapping[str, int]  # by modality


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice; `finish_reason` comes with the last of them."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    generated: int
    finish_reason: str | None


class Answer:
    """Reads a group's progress as deltas and totals."""

    def __init__(
        self, plan: GenerationPlan, group: GenerationGroup, *, tokenizer: Tokenizer, block_size: int, created: int
    ) -> None:
        self.plan = plan
        self.created = created
        self._group = group
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._seen = [0] * len(plan.requests)

    def take_deltas(self, *, singly: bool = False) -> list[Delta]:
        """Return what came since the last call, at most one a choice; tokens that came together are together, unless
        they are taken `singly`."""
        found = []
        for index, member in enumerate(self._group.members):
            while (first := self._seen[index]) < member.generated:
                self._seen[index] = first + 1 if singly else member.generated
                found.append(self._delta(index, first, self._seen[index]))
        return found

    def read_choice(self, index: int) -> Delta:
        """Everything a choice has so far."""
        return self._delta(index, 0, self._group.members[index].generated)

    def count_usage(self) -> AnswerUsage:
        """Totals as of now. Choices of one prompt share it, so its cached tokens are the first choice's."""
        choices = len(self.plan.requests) // len(self.plan.prompts)
        firsts = [member.first for member in self._group.members[::choices]]
        cached = [first.cached_tokens if first is not None else 0 for first in firsts]
        if self.plan.remote_cached_tokens is not None:
            cached = [self.plan.remote_cached_tokens]
        full = [len(prompt) // self._block_size * self._block_size for prompt in self.plan.prompts]
        media = [one for request in self.plan.requests[::choices] for one in request.media]
        return AnswerUsage(
            media_tokens=count_by_kind(media),
            prompt_tokens=self.plan.prompt_tokens,
            completion_tokens=sum(member.generated for member in self._group.members),
            cached_tokens=sum(cached),
            created_cache_tokens=sum(blocks - hits for blocks, hits in zip(full, cached, strict=True)),
        )

    def _delta(self, index: int, first: int, last: int) -> Delta:
        ids = tuple(self.plan.slice_output_ids(index, first, last))
        member = self._group.members[index]
        finished = member.finished if last == member.generated else None
        return Delta(index, self._tokenizer.decode(ids), ids, last, None if finished is None else finished.reason)
