"""A simulated vLLM server as an ASGI app: routes, error answers, and the life of its engine."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request

from kvproxy.base.types import Clock, utc_seconds
from kvproxy.lab.simulator import vllm_info as info
from kvproxy.lab.simulator.answering import Faults
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import EngineOutput, FirstToken
from kvproxy.lab.simulator.engine_runner import EngineRunner, SequenceProgress
from kvproxy.lab.simulator.event_shapes import AnthropicShape, ResponsesShape
from kvproxy.lab.simulator.generation import Planner
from kvproxy.lab.simulator.json_app import JsonApp
from kvproxy.lab.simulator.kv_event_publisher import EventEncoder, KvEventPublisher
from kvproxy.lab.simulator.openai_shapes import ChatShape, CompletionShape
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_errors import VllmError
from kvproxy.lab.simulator.vllm_generate import GenerateRoute, answer_generation
from kvproxy.lab.simulator.vllm_metrics import VllmMetrics
from kvproxy.lab.simulator.vllm_nixl import NixlSide
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.lab.simulator.vllm_state import OnPrefilled, Prefilled, VllmState

Handler = Callable[[VllmState, Request], Awaitable[Any]]

GENERATE: Mapping[str, GenerateRoute] = {
    "/v1/chat/completions": GenerateRoute(
        lambda state, body: [state.prompts.encode_chat(body)],
        lambda state: ChatShape(
            details=state.settings.enable_prompt_tokens_details,
            fingerprint=state.fingerprint,
        ),
    ),
    "/v1/completions": GenerateRoute(
        lambda state, body: state.prompts.encode_completion(body),
        lambda state: CompletionShape(
            details=state.settings.enable_prompt_tokens_details, fingerprint=state.fingerprint
        ),
    ),
    "/v1/responses": GenerateRoute(
        lambda state, body: [state.prompts.encode_responses(body)], lambda state: ResponsesShape()
    ),
    "/v1/messages": GenerateRoute(
        lambda state, body: [state.prompts.encode_anthropic(body)], lambda state: AnthropicShape()
    ),
}
#: Routes of scale-out, which this server is started without.
SCALE_OUT = (*(f"{path}/render" for path in GENERATE), "/v1/chat/completions/derender", "/inference/v1/generate")

HANDLERS: Mapping[tuple[str, str], Handler] = {
    **{("POST", path): info.refuse_scale_out for path in SCALE_OUT},
    ("POST", "/tokenize"): info.answer_tokenize,
    ("POST", "/detokenize"): info.answer_detokenize,
    ("GET", "/v1/models"): info.answer_models,
    ("GET", "/version"): info.answer_version,
    ("GET", "/health"): info.answer_health,
    ("GET", "/ping"): info.answer_health,
    ("POST", "/ping"): info.answer_health,
    ("GET", "/metrics"): info.answer_metrics,
    ("GET", "/kv_event_sources"): info.answer_kv_event_sources,
    ("POST", "/reset_prefix_cache"): info.answer_reset_prefix_cache,
    ("POST", "/sleep"): info.answer_sleep,
    ("POST", "/wake_up"): info.answer_wake_up,
    ("GET", "/is_sleeping"): info.answer_is_sleeping,
    ("POST", "/v1/messages/count_tokens"): info.answer_count_tokens,
    ("POST", "/sim/faults"): info.set_faults,
    ("GET", "/sim/state"): info.answer_state,
}


class VllmApp(JsonApp):
    """Serve it (it is an ASGI app) while it is entered (it is an async context manager). `on_prefilled` is called with
    each prompt once its KV exists."""

    generating = GENERATE
    handlers = HANDLERS

    def __init__(
        self,
        settings: VllmSettings,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = utc_seconds,
        rng: random.Random | None = None,
        on_prefilled: OnPrefilled | None = None,
    ) -> None:
        super().__init__()
        rng = rng or random.Random()
        self._on_prefilled = on_prefilled
        began_at = wall_clock()
        tokenizer = Tokenizer(word_pieces=settings.word_pieces)
        engine = self.make_engine(settings)
        publisher = _build_publisher(settings, wall_clock)
        on_events = None if publisher is None else publisher.publish
        runner = EngineRunner(engine, clock=clock, on_events=on_events, on_output=self._observe)
        self.state = VllmState(
            settings=settings,
            tokenizer=tokenizer,
            prompts=Prompts(tokenizer, model=settings.root if settings.multimodal else None),
            planner=Planner(settings, tokenizer),
            runner=runner,
            metrics=VllmMetrics(settings, engine, started_at=began_at),
            faults=Faults(),
            publisher=publisher,
            wall_clock=wall_clock,
            rng=rng,
            fingerprint=f"vllm-{settings.version}-{rng.getrandbits(32):08x}",
            started_at=began_at,
            calls=self.calls,
        )
        if settings.nixl is not None:
            size = settings.engine.block_size
            self.state.nixl = NixlSide(
                settings.nixl, block_size=size, runner=runner, faults=self.state.faults, clock=clock, rng=rng
            )
        self.parts = [runner] if publisher is None else [publisher, runner]
        for path, generating in self.generating.items():
            self._add_route("POST", path, partial(answer_generation, self.state, generating))
        for (method, path), handler in self.handlers.items():
            self._add_route(method, path, partial(handler, self.state))

    def make_engine(self, settings: VllmSettings) -> Engine:
        """Return the engine behind the server."""
        return Engine(settings.engine)

    def _add_route(self, method: str, path: str, handler: Callable[[Request], Awaitable[Any]]) -> None:
        async def unless_failing(request: Request) -> Any:
            if path == (faults := self.state.faults.values).fail_path:
                raise VllmError("Internal Server Error", kind="InternalServerError", code=faults.fail_status)
            return await handler(request)

        self.answer(method, path, unless_failing)

    def _observe(self, generation: SequenceProgress, output: EngineOutput) -> None:
        self.state.metrics.observe(generation, output)
        if isinstance(output, FirstToken) and self._on_prefilled is not None:
            request = generation.request
            tokens = request.token_ids[: request.prompt_tokens]
            model = request.lora_name or self.state.settings.root
            self._on_prefilled(Prefilled(tokens, model, request.cache_salt or ""))


def _build_publisher(settings: VllmSettings, wall_clock: Callable[[], float]) -> KvEventPublisher | None:
    if settings.kv_events is None:
        return None
    events = settings.kv_events
    encoder = EventEncoder(
        block_size=settings.engine.block_size, encoding=events.encoding, bytes_hashes=events.bytes_hashes
    )
    return KvEventPublisher(events, encoder=encoder, wall_clock=wall_clock, replay=settings.kv_events_replay)
