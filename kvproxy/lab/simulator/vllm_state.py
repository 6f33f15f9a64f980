"""State shared by the handlers of one simulated vLLM server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.lab.simulator.answering import Faults
from kvproxy.lab.simulator.engine_runner import EngineRunner
from kvproxy.lab.simulator.generation import GenerationPlan, Planner
from kvproxy.lab.simulator.kv_event_publisher import KvEventPublisher
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_metrics import VllmMetrics
from kvproxy.lab.simulator.vllm_nixl import NixlSide
from kvproxy.lab.simulator.vllm_settings import VllmSettings

_KEPT_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt the engine has computed the KV of, as an offloading connector learns of it."""

    token_ids: Sequence[int]
    model: str
    cache_salt: str


OnPrefilled = Callable[[Prefilled], None]


@dataclass(slots=True)
class VllmState:
    """One server's parts. `calls` counts exchanges by method and route, `requests` keeps the latest generations."""

    settings: VllmSettings
    tokenizer: Tokenizer
    prompts: Prompts
    planner: Planner
    runner: EngineRunner
    metrics: VllmMetrics
    faults: Faults
    publisher: KvEventPublisher | None
    wall_clock: Callable[[], float]
    rng: random.Random
    fingerprint: str
    started_at: float
    calls: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    awake: asyncio.Event = field(default_factory=asyncio.Event)  # what generates waits for it
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set by each end of a generation
    nixl: NixlSide | None = None
    requests: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_REQUESTS))

    def __post_init__(self) -> None:
        self.awake.set()

    def make_id(self) -> str:
        """Sixteen hexadecimal digits, as vLLM's ids have."""
        return f"{self.rng.getrandbits(64):016x}"

    def count_in(self, plan: GenerationPlan, response: ASGIApp) -> ASGIApp:
        """Return the response, which counts as in flight while it is sent."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            self.in_flight += 1
            try:
                await response(scope, receive, send)
            finally:
                self.in_flight -= 1
                self.ended.set()
                for request in plan.requests:
                    self.metrics.forget_request(request.id)

        return respond

    def open_record(self, path: str, plan: GenerationPlan) -> dict[str, Any]:
        """Open the record of one generation; the handler fills in how it went."""
        record: dict[str, Any] = {
            "path": path,
            "id": plan.id,
            "model": plan.model,
            "prompt_tokens": plan.prompt_tokens,
            "stream": plan.stream,
            "outcome": "running",
        }
        self.requests.append(record)
        return record
