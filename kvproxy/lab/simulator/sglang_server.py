"""A simulated SGLang server as an ASGI app: its routes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from kvproxy.base.types import Clock, utc_seconds
from kvproxy.lab.simulator.answering import FaultError, Faults, Serving, Shape
from kvproxy.lab.simulator.engine_io import EngineLoad, SimRequest
from kvproxy.lab.simulator.json_app import Handler, HttpError, JsonApp, detail_error
from kvproxy.lab.simulator.kv_event_publisher import KvEventPublisher
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.sglang_engine import HEALTH_CHECK, SglangEngine, SglangMetrics, with_event_ports
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
from kvproxy.lab.simulator.sglang_settings import SglangSettings, describe_model, describe_server
from kvproxy.lab.simulator.sglang_shapes import SglangChat, SglangCompletion, SglangGenerate, SglangMessages
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_errors import VllmError

_KEPT_REQUESTS = 256
_FLUSHED = b"Cache flushed.\nPlease check backend logs for more details.\n"


class SglangApp(JsonApp):
    """Serve it (it is an ASGI app) while it is entered (it is an async context manager). `ranks` are its engines.
    `on_prefilled` is called by none of them: LMCache's connector is vLLM's."""

    def __init__(
        self,
        settings: SglangSettings,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = utc_seconds,
        rng: random.Random | None = None,
        on_prefilled: object = None,
    ) -> None:
        super().__init__()
        self.settings = settings = with_event_ports(settings)
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()
        self._started_at = wall_clock()
        self._tokenizer = Tokenizer(word_pieces=True)
        self._prompts = Prompts(self._tokenizer, drops_header=False, wide_media=True)
        self._planner = SglangPlanner(settings, self._tokenizer)
        self.ranks = [
            SglangEngine(
                settings,
                rank,
                clock=clock,
                wall_clock=wall_clock,
                on_output=lambda *seen: self._metrics.observe(*seen),
            )
            for rank in range(settings.dp_size)
        ]
        self._metrics = SglangMetrics(settings, [one.engine for one in self.ranks])
        self._turn = 0  # rank of the next request that names none
        self.parts = [part for engine in self.ranks for part in engine.parts]
        self.faults = Faults()
        self.requests: deque[dict[str, Any]] = deque(maxlen=_KEPT_REQUESTS)
        for (method, path), handler in self._build_routes().items():
            self._add_route(method, path, handler)

    @property
    def publisher(self) -> KvEventPublisher | None:
        """The first rank's."""
        return self.ranks[0].publisher

    @property
    def load(self) -> EngineLoad:
        """How busy its engines are, the fullest one's KV usage."""
        loads = [one.engine.load for one in self.ranks]
        running, waiting = (sum(getattr(load, name) for load in loads) for name in ("running", "waiting"))
        return EngineLoad(running, waiting, max(load.kv_usage for load in loads))

    def _build_routes(self) -> dict[tuple[str, str], Handler]:
        chat = self._answer_chat
        completion = self._answer_completion
        prefix = "get_" if self.settings.old_names else ""
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): chat,
            ("POST", "/v1/completions"): completion,
            ("POST", "/v1/messages"): self._answer_messages,
            ("POST", "/v1/messages/count_tokens"): self._answer_count,
            ("POST", "/generate"): self._answer_generate,
            ("POST", "/tokenize"): self._answer_tokenize,
            ("POST", "/v1/tokenize"): self._answer_tokenize,
            ("GET", "/v1/models"): self._answer_models,
            ("GET", "/health"): self._answer_health_generate,
            ("GET", "/health_generate"): self._answer_health_generate,
            ("GET", f"/{prefix}server_info"): self._answer_server_info,
            ("GET", f"/{prefix}model_info"): self._answer_model_info,
            ("GET", "/flush_cache"): self._answer_flush,
            ("POST", "/flush_cache"): self._answer_flush,
            ("POST", "/sim/faults"): self._set_faults,
            ("GET", "/sim/state"): self._answer_state,
        }
        if self.settings.has_ready:
            routes["GET", "/ready"] = self._answer_ready
        if self.settings.enable_metrics:
            routes["GET", "/metrics"] = self._answer_metrics
        return routes

    def _add_route(self, method: str, path: str, handler: Handler) -> None:
        async def answer(request: Request) -> Any:
            try:
                return await handler(request)
            except VllmError as error:  # errors of a prompt that both engines report
                raise HttpError(error.status, flatten(error.body)) from error

        self.answer(method, path, answer)

    async def _answer_chat(self, request: Request) -> Any:
        body = await _read_json(request)
        shape = SglangChat(report=self.settings.enable_cache_report)
        return self._generate(request, body, [self._prompts.encode_chat(body)], shape)

    async def _answer_completion(self, request: Request) -> Any:
        body = await _read_json(request)
        shape = SglangCompletion(report=self.settings.enable_cache_report)
        return self._generate(request, body, self._prompts.encode_completion(body), shape)

    async def _answer_messages(self, request: Request) -> Any:
        """Answer `/v1/messages`: the body names no rank here, and errors are Anthropic's."""
        body = await _read_json(request)
        shape = SglangMessages(report=self.settings.enable_cache_report)
        ranked = {name: value for name, value in body.items() if not name.endswith("_rank")}
        try:
            prompt = self._encode_messages(body)
            return self._generate(request, ranked, [prompt], shape, dead=lambda: as_messages_error(engine_dead()))
        except (SglangError, VllmError) as error:
            flat = error if isinstance(error, SglangError) else HttpError(error.status, flatten(error.body))
            raise as_messages_error(flat) from error

    async def _answer_count(self, request: Request) -> Any:
        return {"input_tokens": len(self._encode_messages(await _read_json(request)))}

    def _encode_messages(self, body: Mapping[str, Any]) -> list[int]:
        try:
            chat = messages_as_chat(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise SglangError(f"1 validation error: {error}") from error
        return self._prompts.encode_chat(chat)

    async def _answer_generate(self, request: Request) -> Any:
        """Answer `/generate`, ignoring the rank header."""
        body = await _read_json(request)
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
        rank = read_rank(request.headers.get(RANK_HEADER) if steered else None, body, len(self.ranks))
        plan = self._planner.plan(body, prompts, str(body.get("rid") or f"{self._rng.getrandbits(128):032x}"))
        engine = self._next_rank() if rank is None else self.ranks[rank]
        self._admit(engine)
        record = {"path": request.url.path, "id": plan.id, "priority": body.get("priority"), "outcome": "running"}
        record["rank"] = engine.rank
        self.requests.append(record)
        size = self.settings.page_size
        serving = Serving(engine.runner, self.faults, self._tokenizer, size, self._wall_clock, dead)
        return serving.answer(plan, shape, record)

    def _next_rank(self) -> SglangEngine:
        """In turn, whatever they hold."""
        engine = self.ranks[self._turn % len(self.ranks)]
        self._turn += 1
        return engine

    def _admit(self, engine: SglangEngine) -> None:
        values = self.faults.values
        if values.engine_dead:
            raise engine_dead()
        if self.faults.use_up("fail_next"):
            raise SglangError("Internal server error", kind="InternalServerError", code=values.fail_status)
        limit = self.settings.max_queued_requests
        if self.faults.use_up("busy_next") or (limit is not None and engine.engine.load.waiting >= limit):
            raise queue_full()

    async def _answer_tokenize(self, request: Request) -> Any:
        body = await _read_json(request)
        if self.faults.values.no_tokenize:
            raise detail_error(404, "Not Found")
        await self.faults.stall(self.faults.values.slow_tokenize_s)
        if body.get("messages") is not None:
            if not self.settings.tokenizes_chats:
                raise SglangError("1 validation error: prompt: Field required", param="prompt")
            tokens = self._prompts.encode_chat(body)
        else:
            tokens = self._prompts.encode_tokenize(body)
        limit = self.settings.context_length
        return {"tokens": tokens, "count": len(tokens), "max_model_len": limit}

    async def _answer_models(self, request: Request) -> Any:
        model = self.settings.model
        row = {"id": model, "object": "model", "created": int(self._started_at), "owned_by": "sglang"}
        row |= {"root": model, "parent": None, "max_model_len": self.settings.context_length}
        return {"object": "list", "data": [row]}

    async def _answer_health_generate(self, request: Request) -> Any:
        """Answer after a generated token, in whole steps."""
        check = SimRequest(
            id=f"{HEALTH_CHECK}{self._rng.getrandbits(64)}",
            block_hashes=(),
            prompt_tokens=1,
            output_tokens=1,
            token_ids=(0, 0),
        )
        with self._next_rank().runner.run_requests([check]) as group:
            await asyncio.sleep(self.settings.health_step_s)
            well = group.ended and not group.failed and not self.faults.values.engine_dead
        return Response(status_code=200 if well else 503)

    async def _answer_ready(self, request: Request) -> Any:
        return Response(status_code=503 if self.faults.values.engine_dead else 200)

    async def _answer_server_info(self, request: Request) -> Any:
        return describe_server(self.settings, self.publisher)

    async def _answer_model_info(self, request: Request) -> Any:
        return describe_model(self.settings)

    async def _answer_metrics(self, request: Request) -> Any:
        return Response(self._metrics.render_exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer_flush(self, request: Request) -> Any:
        """Answer 400 while anything runs, at any rank; otherwise flush, whose events go out with the next ones."""
        done = [engine.reset_prefix_cache() for engine in self.ranks]
        return Response(_FLUSHED, 200 if all(done) else 400)

    async def _set_faults(self, request: Request) -> Any:
        try:
            changes = await _read_json(request)
            for engine in self.ranks:
                values = self.faults.apply_changes(changes, engine.runner, engine.publisher)
        except FaultError as error:
            raise SglangError(str(error)) from error
        return values

    async def _answer_state(self, request: Request) -> Any:
        figures = self.load
        state = {"running": figures.running, "waiting": figures.waiting, "kv_usage": figures.kv_usage}
        return {**state, "calls": dict(self.calls), "requests": list(self.requests)}


async def _read_json(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise SglangError("1 validation error: JSON decode error", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise SglangError("1 validation error: Input should be a valid dictionary", kind="Bad Request")
    return body
