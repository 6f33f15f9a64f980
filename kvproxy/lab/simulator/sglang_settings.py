"""Start options of a simulated SGLang server, and their report (`/get_server_info`, `/model_info`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kvproxy.lab.simulator.engine_io import EngineSettings, Scheduling
from kvproxy.lab.simulator.kv_event_publisher import KvEventPublisher


class EventForm(StrEnum):
    """How KV events are written: releases before 0.5.23 had arrays, as old vLLMs."""

    MAP = "map"
    ARRAY = "array"


@dataclass(frozen=True, slots=True)
class EventSettings:
    """`--kv-events-config`; port 0 picks a free one. `described` is whether `/server_info` shows where they are in a
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
    `/health` runs a request and looks after `health_step_s` whether its token came.
    `dp_size` ranks behind one address, `engine` that of each, with KV events a port above those of the rank before.
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
    health_step_s: float = 1.0
    has_ready: bool = True
    old_names: bool = False
    tokenizes_chats: bool = True
    default_output_tokens: int = 128
    dp_size: int = 1
    version: str = "0.5.23"

    def __post_init__(self) -> None:
        if not self.engine.token_outputs:
            raise ValueError("a streaming server needs an engine with token_outputs")

    @property
    def models(self) -> tuple[str, ...]:
        """Name of its one model."""
        return (self.model,)

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
        """True if keys of the radix tree are pairs of tokens."""
        return (self.speculative_algorithm or "").upper().startswith(("EAGLE", "NEXTN"))

    @property
    def scheduler(self) -> EngineSettings:
        """The engine's, in the order that priorities ask for."""
        order = Scheduling.PRIORITY if self.enable_priority_scheduling else Scheduling.FCFS
        return replace(self.engine, scheduling=order)


def describe_server(settings: SglangSettings, publisher: KvEventPublisher | None) -> dict[str, Any]:
    """Its arguments, what it made of them, and each rank's state: the same again. `publisher` is the first rank's."""
    arguments = _arguments(settings, publisher)
    described: dict[str, Any] = {}
    events = settings.kv_events
    if events is None or events.described:
        described["kv_events"] = None if publisher is None else _descriptor(settings, publisher)
    return {
        **arguments,
        "status": "ready",
        "max_total_num_tokens": settings.max_total_num_tokens,
        "max_req_input_len": settings.context_length - 6,
        "internal_states": [
            {**arguments, "last_gen_throughput": 0.0, "effective_max_running_requests_per_dp": 256}
            for _ in range(settings.dp_size)
        ],
        "version": settings.version,
        **described,
    }


def describe_model(settings: SglangSettings) -> dict[str, Any]:
    """`/model_info`."""
    return {
        "model_path": settings.model,
        "tokenizer_path": settings.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def _arguments(settings: SglangSettings, publisher: KvEventPublisher | None) -> dict[str, Any]:
    return {
        "model_path": settings.model,
        "served_model_name": settings.model,
        "context_length": settings.context_length,
        "api_key": None,
        "admin_api_key": None,
        "mem_fraction_static": 0.836,
        "max_running_requests": settings.engine.max_sequences,
        "max_queued_requests": settings.max_queued_requests,
        "chunked_prefill_size": settings.engine.max_batched_tokens,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": settings.enable_priority_scheduling,
        "schedule_low_priority_values_first": settings.schedule_low_priority_values_first,
        "page_size": settings.page_size,
        "tp_size": 1,
        "dp_size": settings.dp_size,
        "enable_metrics": settings.enable_metrics,
        "enable_cache_report": settings.enable_cache_report,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
        "enable_session_radix_cache": False,
        "speculative_algorithm": settings.speculative_algorithm,
        "disaggregation_mode": "null",
        "kv_events_config": None if publisher is None else json.dumps(_config(publisher)),
    }


def _config(publisher: KvEventPublisher) -> dict[str, Any]:
    given = {"publisher": "zmq", "endpoint": _bound(publisher.endpoint), "topic": publisher.settings.topic}
    if publisher.replay_endpoint is not None:
        given["replay_endpoint"] = _bound(publisher.replay_endpoint)
    return given


def _descriptor(settings: SglangSettings, publisher: KvEventPublisher) -> dict[str, Any]:
    return {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": int(publisher.endpoint.rpartition(":")[2]),
        "topic": publisher.settings.topic,
        "block_size": settings.page_size,
        "dp_size": settings.dp_size,
    }


def _bound(address: str) -> str:
    """As it is given on the command line."""
    return f"tcp://*:{address.rpartition(':')[2]}"
