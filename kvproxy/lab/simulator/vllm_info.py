"""The routes of a simulated vLLM that report or change something without generating."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvproxy.lab.simulator.answering import FaultError
from kvproxy.lab.simulator.json_app import detail_error
from kvproxy.lab.simulator.vllm_errors import SCALE_OUT_DISABLED, VllmError, missing_fields
from kvproxy.lab.simulator.vllm_generate import read_json
from kvproxy.lab.simulator.vllm_state import VllmState

EXPOSITION = "text/plain; version=1.0.0; charset=utf-8"


async def answer_tokenize(state: VllmState, request: Request) -> Any:
    """Ids of a prompt or of a rendered conversation; there is no length limit."""
    body = await read_json(request)
    if state.faults.values.no_tokenize:
        raise detail_error(404, "Not Found")
    await state.faults.stall(state.faults.values.slow_tokenize_s)
    state.planner.check_model(body)
    tokens = state.prompts.encode_tokenize(body)
    strings = state.tokenizer.token_strings(tokens) if body.get("return_token_strs") else None
    limit = state.settings.max_model_len
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings}


async def answer_detokenize(state: VllmState, request: Request) -> Any:
    """Answer with the text of ids."""
    body = await read_json(request)
    if not isinstance(body.get("tokens"), list):
        raise missing_fields(body, "tokens")
    try:
        prompt = state.tokenizer.decode(body["tokens"])
    except (ValueError, TypeError) as error:
        raise VllmError(str(error)) from error
    return {"prompt": prompt}


async def answer_models(state: VllmState, request: Request) -> Any:
    """List the base model and its adapters, even when the engine is dead."""
    settings = state.settings
    rows = [
        {
            "id": name,
            "object": "model",
            "created": int(state.started_at),
            "owned_by": "vllm",
            "root": settings.root if name == settings.model else name,
            "parent": None if name == settings.model else settings.model,
            "max_model_len": settings.max_model_len if name == settings.model else None,
            "permission": [_permission(state)],
        }
        for name in settings.models
    ]
    return {"object": "list", "data": rows}


async def answer_version(state: VllmState, request: Request) -> Any:
    """Answer with the simulated vLLM version."""
    return {"version": state.settings.version}


async def answer_health(state: VllmState, request: Request) -> Any:
    """Empty 200, or empty 503 when the engine is dead."""
    return Response(status_code=503 if state.faults.values.engine_dead else 200)


async def answer_metrics(state: VllmState, request: Request) -> Any:
    """Prometheus text."""
    return Response(state.metrics.render_exposition(), media_type=EXPOSITION)


async def answer_kv_event_sources(state: VllmState, request: Request) -> Any:
    """Where cache events are published, by data-parallel rank."""
    source = describe_event_source(state)
    return {} if source is None else {str(state.settings.rank): source}


def describe_event_source(state: VllmState) -> dict[str, Any] | None:
    """Where one rank publishes; None: it does not."""
    publisher = state.publisher
    if publisher is None:
        return None
    settings = publisher.settings
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "buffer_steps": settings.buffer_steps,
        "hwm": settings.hwm,
        "max_queue_size": 100_000,
        "topic": settings.topic,
    }


async def answer_reset_prefix_cache(state: VllmState, request: Request) -> Any:
    """Forgets the prefixes unless something runs."""
    return {"success": state.runner.engine.scheduler.cache.clear()}


async def answer_sleep(state: VllmState, request: Request) -> Any:
    """Pause, and give the cache up from level 1 on. Requests under way end first, as with `mode=wait`."""
    level = int(request.query_params.get("level", "1"))
    state.awake.clear()
    while state.in_flight:
        state.ended.clear()
        await state.ended.wait()
    if level:
        state.runner.engine.scheduler.cache.clear()
    state.metrics.sleep_level = level
    return {"status": "sleeping", "level": level}


async def answer_wake_up(state: VllmState, request: Request) -> Any:
    """Go on with requests that came meanwhile."""
    await state.faults.stall(state.faults.values.slow_wake_s)
    state.metrics.sleep_level = None
    state.awake.set()
    return {"status": "awake", "tags": None}


async def answer_is_sleeping(state: VllmState, request: Request) -> Any:
    """Answer whether it sleeps, at any level."""
    return {"is_sleeping": not state.awake.is_set()}


async def answer_count_tokens(state: VllmState, request: Request) -> Any:
    """Anthropic's count."""
    body = await read_json(request)
    state.planner.check_model(body)
    count = len(state.prompts.encode_anthropic(body))
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


async def set_faults(state: VllmState, request: Request) -> Any:
    """Set the faults named in the body (the simulator's own route) and answer with all of them."""
    body = await read_json(request)
    try:
        values = state.faults.apply_changes(body, state.runner, state.publisher)
    except FaultError as error:
        raise VllmError(str(error)) from error
    return values


async def answer_state(state: VllmState, request: Request) -> Any:
    """Answer with load, calls per route and latest generations (the simulator's own route)."""
    figures = state.runner.engine.load
    return {
        "running": figures.running,
        "waiting": figures.waiting,
        "kv_usage": figures.kv_usage,
        "in_flight": state.in_flight,
        "calls": dict(state.calls),
        "requests": list(state.requests),
        "published_batches": 0 if state.publisher is None else state.publisher.published,
        "faults": dataclasses.asdict(state.faults.values),
    }


def _permission(state: VllmState) -> dict[str, Any]:
    return {
        "id": f"modelperm-{state.make_id()}",
        "object": "model_permission",
        "created": int(state.started_at),
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


async def refuse_scale_out(state: VllmState, request: Request) -> Any:
    """Refuse what only a server with `--enable-scale-out` answers."""
    await read_json(request)
    raise VllmError(SCALE_OUT_DISABLED, kind="PermissionDeniedError", code=403)
