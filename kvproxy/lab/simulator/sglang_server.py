"""A simulated SGLang server as an ASGI app: its routes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvproxy.base.types import Clock, utc_seconds
from kvproxy.lab.simulator.answering import FaultError, Faults
from kvproxy.lab.simulator.engine_io import EngineLoad, SimRequest
from kvproxy.lab.simulator.json_app import Handler, HttpError, JsonApp, detail_error
from kvproxy.lab.simulator.kv_event_publisher import KvEventPublisher
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.sglang_engine import HEALTH_CHECK, SglangEngine, SglangMetrics, with_event_ports
from kvproxy.lab.simulator.sglang_generate import SglangGenerations, read_json
from kvproxy.lab.simulator.sglang_requests import SglangError, flatten
from kvproxy.lab.simulator.sglang_settings import SglangSettings, describe_model, describe_server
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_errors import VllmError

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
        self._rng = rng or random.Random()
        self._started_at = wall_clock()
        self._tokenizer = Tokenizer(word_pieces=True)
        self._prompts = Prompts(self._tokenizer, drops_header=False, wide_media=True)
        self.ranks = [
            SglangEngine(
                settings, rank, clock=clock, wall_clock=wall_clock, on_output=lambda *seen: self._metrics.observe(*seen)
            )
            for rank in range(settings.dp_size)
        ]
        self._metrics = SglangMetrics(settings, [one.engine for one in self.ranks])
        self.parts = [part for engine in self.ranks for part in engine.parts]
        self.faults = Faults()
        self._generations = SglangGenerations(
            settings,
            self.ranks,
            self.faults,
            self._tokenizer,
            prompts=self._prompts,
            wall_clock=wall_clock,
            rng=self._rng,
        )
        self.requests = self._generations.requests
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
        generations = self._generations
        prefix = "get_" if self.settings.old_names else ""
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): generations.answer_chat,
            ("POST", "/v1/completions"): generations.answer_completion,
            ("POST", "/v1/messages"): generations.answer_messages,
            ("POST", "/v1/messages/count_tokens"): generations.answer_count,
            ("POST", "/generate"): generations.answer_generate,
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

    async def _answer_tokenize(self, request: Request) -> Any:
        body = await read_json(request)
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
        with self._generations.next_rank().runner.run_requests([check]) as group:
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
            changes = await read_json(request)
            for engine in self.ranks:
                values = self.faults.apply_changes(changes, engine.runner, engine.publisher)
        except FaultError as error:
            raise SglangError(str(error)) from error
        return values

    async def _answer_state(self, request: Request) -> Any:
        figures = self.load
        state = {"running": figures.running, "waiting": figures.waiting, "kv_usage": figures.kv_usage}
        return {**state, "calls": dict(self.calls), "requests": list(self.requests)}
