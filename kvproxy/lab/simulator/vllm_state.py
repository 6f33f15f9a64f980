"""State shared by the handlers of one simulated vLLM server, with switches that make it misbehave."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvproxy.lab.simulator.engine_runner import EngineRunner
from kvproxy.lab.simulator.generation import GenerationPlan, Planner
from kvproxy.lab.simulator.kv_event_publisher import KvEventPublisher
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.tokenizer import Tokenizer
from kvproxy.lab.simulator.vllm_metrics import VllmMetrics
from kvproxy.lab.simulator.vllm_settings import VllmSettings

_KEPT_REQUESTS = 256


class FaultError(ValueError):
    """An unknown fault, or a value of the wrong kind."""


@dataclass(slots=True)
class FaultValues:
    """Everything off by default. Seconds may be large: a stall ends early when the faults are changed.

    `fail_next` generation requests answer `fail_status`; `busy_next` answer vLLM's 503; a stream is cut hard after
    `cut_after_chunks` chunks (`cut_next` of them), or ends with vLLM's error event after `error_after_chunks`.
    """

    stall_head_s: float = 0.0
    stall_first_byte_s: float = 0.0
    stall_mid_stream_s: float = 0.0
    stall_mid_stream_after_chunks: int = 1
    slow_tokenize_s: float = 0.0
    fail_next: int = 0
    fail_status: int = 500
    busy_next: int = 0
    cut_next: int = 0
    cut_after_chunks: int = 1
    error_next: int = 0
    error_after_chunks: int = 1
    no_tokenize: bool = False
    engine_dead: bool = False
    lose_events: int = 0
    repeat_events: int = 0


class Faults:
    """The values in force, and the stalls that wait for them to change."""

    def __init__(self) -> None:
        self.values = FaultValues()
        self._changed = asyncio.Event()

    def update(self, changes: dict[str, Any]) -> None:
        """Set the named values (`{"reset": true}` first puts everything back) and releases every stall."""
        known = {field.name: type(field.default) for field in fields(FaultValues)}
        values = dict(changes)
        reset = values.pop("reset", False)
        for name, value in values.items():
            expected = known.get(name)
            if expected is None:
                raise FaultError(f"unknown fault {name!r}; known: {', '.join(known)}")
            accepted = (int, float) if expected is float else expected
            if not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool):
                raise FaultError(f"fault {name!r} takes {expected.__name__}, not {value!r}")
        if reset:
            self.values = FaultValues()
        for name, value in values.items():
            setattr(self.values, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def apply_changes(
        self, changes: dict[str, Any], runner: EngineRunner, publisher: KvEventPublisher | None
    ) -> dict[str, Any]:
        """`update`, and what strikes at once in the engine and its events. All values as they are now."""
        self.update(changes)
        if self.values.engine_dead:
            runner.kill()
        if publisher is not None:
            publisher.lose_next = self.values.lose_events
            publisher.repeat_next = self.values.repeat_events
        return asdict(self.values)

    async def stall(self, seconds: float) -> None:
        """Wait that long, or until the faults change."""
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                return

    def use_up(self, name: str) -> bool:
        """Use up one of a counted fault; False when none is left."""
        left: int = getattr(self.values, name)
        if left <= 0:
            return False
        setattr(self.values, name, left - 1)
        return True


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
    requests: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_REQUESTS))

    def make_id(self) -> str:
        """Sixteen hexadecimal digits, as vLLM's ids have."""
        return f"{self.rng.getrandbits(64):016x}"

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
