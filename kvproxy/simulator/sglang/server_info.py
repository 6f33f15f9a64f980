"""What a simulated SGLang says of itself: `/server_info` and `/model_info`, with the real fields."""

from __future__ import annotations

import json
from typing import Any

from kvproxy.simulator.kv_event_publisher import KvEventPublisher
from kvproxy.simulator.sglang.settings import SglangSettings


def describe_server(settings: SglangSettings, publisher: KvEventPublisher | None) -> dict[str, Any]:
    """Its arguments, what it made of them, and each rank's state: the same again."""
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
        "internal_states": [{**arguments, "last_gen_throughput": 0.0, "effective_max_running_requests_per_dp": 256}],
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
        "dp_size": 1,
        "enable_metrics": settings.enable_metrics,
        "enable_cache_report": settings.enable_cache_report,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
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
        "dp_size": 1,
    }


def _bound(address: str) -> str:
    """As it is given on the command line."""
    return f"tcp://*:{address.rpartition(':')[2]}"
