"""The routes of a simulated SGLang that generate."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from kvproxy.lab.simulator.answering import Faults, Serving, Shape
from kvproxy.lab.simulator.json_app import HttpError
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.sglang_engine import SglangEngine
from kvproxy.lab.simulator.sglang_requests import (
    RANK_HEADER,
    SglangError,
    SglangPlanner,
    as_messages_error,
    engine_dead,
    flatten,
    messages_as_chat,
    queue_full,
    read_rank,
)
from kvproxy.lab.simulator.sglang_settings import SglangSettings
from kvproxy.lab.simulator.sglang_shapes import SglangChat, SglangCompletion, SglangGenerate, SglangMessages
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_errors import VllmError

_KEPT_REQUESTS = 256


class SglangGenerations:
    """Answers generations by the rank that they name, or by each in turn. `requests` has the latest of them."""

    def __init__(
        self,
        settings: SglangSettings,
        ranks: Sequence[SglangEngine],
        faults: Faults,
        tokenizer: Tokenizer,
        *,
        prompts: Prompts,
        wall_clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._faults = faults
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._wall_clock = wall_clock
        self._rng = rng
        self._planner = SglangPlanner(settings, tokenizer)
        self._turn = 0  # rank of the next request that names none
        self.requests: deque[dict[str, Any]] = deque(maxlen=_KEPT_REQUESTS)

    async def answer_chat(self, request: Request) -> Any:
        body = await read_json(request)
        shape = SglangChat(report=self._settings.enable_cache_report)
        return self._generate(request, body, [self._prompts.encode_chat(body)], shape)

    async def answer_completion(self, request: Request) -> Any:
        body = await read_json(request)
        shape = SglangCompletion(report=self._settings.enable_cache_report)
        return self._generate(request, body, self._prompts.encode_completion(body), shape)

    async def answer_messages(self, request: Request) -> Any:
        """Answer `/v1/messages`: the body names no rank here, and errors are Anthropic's."""
        body = await read_json(request)
        shape = SglangMessages(report=self._settings.enable_cache_report)
        ranked = {name: value for name, value in body.items() if not name.endswith("_rank")}
        try:
            prompt = self._encode_messages(body)
            return self._generate(request, ranked, [prompt], shape, dead=lambda: as_messages_error(engine_dead()))
        except (SglangError, VllmError) as error:
            flat = error if isinstance(error, SglangError) else HttpError(error.status, flatten(error.body))
            raise as_messages_error(flat) from error

    async def answer_count(self, request: Request) -> Any:
        return {"input_tokens": len(self._encode_messages(await read_json(request)))}

    def _encode_messages(self, body: Mapping[str, Any]) -> list[int]:
        try:
            chat = messages_as_chat(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise SglangError(f"1 validation error: {error}") from error
        return self._prompts.encode_chat(chat)

    async def answer_generate(self, request: Request) -> Any:
        """Answer `/generate`, ignoring the rank header."""
        body = await read_json(request)
        prompt = body.get("input_ids") if body.get("text") is None else body["text"]
        wanted = {**body, **(body.get("sampling_params") or {}), "prompt": prompt}
        prompts = self._prompts.encode_completion(wanted)[:1]
        return self._generate(request, wanted, prompts, SglangGenerate(), steered=False)

    def _generate(
        self,
        request: Request,
        body: Mapping[str, Any],
        prompts: list[list[int]],
        shape: Shape,
        *,
        dead: Callable[[], HttpError] = engine_dead,
        steered: bool = True,
    ) -> ASGIApp:
        """Return a generation, sent as it is made; `steered`: the header may name a rank."""
        rank = read_rank(request.headers.get(RANK_HEADER) if steered else None, body, len(self._ranks))
        plan = self._planner.plan(body, prompts, str(body.get("rid") or f"{self._rng.getrandbits(128):032x}"))
        engine = self.next_rank() if rank is None else self._ranks[rank]
        self._admit(engine)
        record = {"path": request.url.path, "id": plan.id, "priority": body.get("priority"), "outcome": "running"}
        record["rank"] = engine.rank
        self.requests.append(record)
        size = self._settings.page_size
        serving = Serving(engine.runner, self._faults, self._tokenizer, size, self._wall_clock, dead)
        return serving.answer(plan, shape, record)

    def next_rank(self) -> SglangEngine:
        """In turn, whatever they hold."""
        engine = self._ranks[self._turn % len(self._ranks)]
        self._turn += 1
        return engine

    def _admit(self, engine: SglangEngine) -> None:
        values = self._faults.values
        if values.engine_dead:
            raise engine_dead()
        if self._faults.use_up("fail_next"):
            raise SglangError("Internal server error", kind="InternalServerError", code=values.fail_status)
        limit = self._settings.max_queued_requests
        if self._faults.use_up("busy_next") or (limit is not None and engine.engine.load.waiting >= limit):
            raise queue_full()


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as an object, or SGLang's error about it."""
    raw = await request.body()
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise SglangError("1 validation error: JSON decode error", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise SglangError("1 validation error: Input should be a valid dictionary", kind="Bad Request")
    return body
