"""What a simulated SGLang server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvproxy.simulator.engine_io import EngineSettings, Scheduling


class EventForm(StrEnum):
    """How KV events are written: releases before 0.5.23 had arrays, as old vLLMs."""

    MAP = "map"
    ARRAY = "array"


@dataclass(frozen=True, slots=True)
class EventSettings:
    """`--kv-events-config`; port 0 picks a free one. `described` is whether `/server_info` says where they are in a
    field of its own, which older releases do not."""

    host: str = "127.0.0.1"
    port: int = 0
    replay_port: int = 0
    topic: str = ""
    form: EventForm = EventForm.MAP
    replay: bool = True
    described: bool = True
    buffer_steps: int = 10_000


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """Names after SGLang's own flags; the page size and the number of pages are the engine's blocks.

    `kv_events` None publishes nothing. `speculative_algorithm` EAGLE keys the radix tree by pairs of tokens.
    `health_generates`: `/health` runs a request and looks after `health_step_s` whether its token came.
    `old_names` answers under `/get_server_info` alone. `tokenizes_chats`: what older releases' `/tokenize` cannot.
    """

    model: str = "sim"
    context_length: int = 32_768
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(4096, 16, token_outputs=True))
    kv_events: EventSettings | None = None
    speculative_algorithm: str | None = None
    enable_cache_report: bool = True
    enable_metrics: bool = True
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    max_queued_requests: int | None = None
    health_generates: bool = True
    health_step_s: float = 1.0
    has_ready: bool = True
    old_names: bool = False
    tokenizes_chats: bool = True
    default_output_tokens: int = 128
    version: str = "0.5.23"

    def __post_init__(self) -> None:
        if not self.engine.token_outputs:
            raise ValueError("a streaming server needs an engine with token_outputs")

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.engine.block_size

    @property
    def max_total_num_tokens(self) -> int:
        """Tokens of KV memory."""
        return self.engine.capacity_blocks * self.engine.block_size

    @property
    def paired(self) -> bool:
        """Whether keys of the radix tree are pairs of tokens."""
        return (self.speculative_algorithm or "").upper().startswith(("EAGLE", "NEXTN"))

    @property
    def scheduler(self) -> EngineSettings:
        """The engine's, in the order that priorities ask for."""
        order = Scheduling.PRIORITY if self.enable_priority_scheduling else Scheduling.FCFS
        return replace(self.engine, scheduling=order)
