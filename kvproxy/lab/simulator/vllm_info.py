"""The routes of a simulated vLLM that report or change something without generating."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import xxhash

from kvproxy.lab.simulator.http_call import HttpCall
from kvproxy.lab.simulator.vllm_errors import VllmError, engine_dead, missing_fields
from kvproxy.lab.simulator.vllm_generate import read_json
from kvproxy.lab.simulator.vllm_state import FaultError, VllmState

_EMBEDDING_SIZE = 16


async def answer_tokenize(state: VllmState, call: HttpCall) -> None:
    """Ids of a prompt or of a rendered conversation; there is no length limit."""
    body = await read_json(call)
    if state.faults.values.no_tokenize:
        await call.reply_json({"detail": "Not Found"}, 404)
        return
    await state.faults.stall(state.faults.values.slow_tokenize_s)
    state.planner.check_model(body)
    tokens = state.prompts.encode_tokenize(body)
    strings = state.tokenizer.token_strings(tokens) if body.get("return_token_strs") else None
    limit = state.settings.max_model_len
    await call.reply_json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})


async def answer_detokenize(state: VllmState, call: HttpCall) -> None:
    """Answer with the text of ids."""
    body = await read_json(call)
    if not isinstance(body.get("tokens"), list):
        raise missing_fields(body, "tokens")
    try:
        prompt = state.tokenizer.decode(body["tokens"])
    except (ValueError, TypeError) as error:
        raise VllmError(str(error)) from error
    await call.reply_json({"prompt": prompt})


async def answer_models(state: VllmState, call: HttpCall) -> None:
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
    await call.reply_json({"object": "list", "data": rows})


async def answer_version(state: VllmState, call: HttpCall) -> None:
    """Answer with the simulated vLLM version."""
    await call.reply_json({"version": state.settings.version})


async def answer_health(state: VllmState, call: HttpCall) -> None:
    """Empty 200, or empty 503 when the engine is dead."""
    await call.send_reply(503 if state.faults.values.engine_dead else 200)


async def answer_load(state: VllmState, call: HttpCall) -> None:
    """Answer with the requests in flight if tracking is on; otherwise always 0."""
    tracked = state.in_flight if state.settings.enable_server_load_tracking else 0
    await call.reply_json({"server_load": tracked})


async def answer_metrics(state: VllmState, call: HttpCall) -> None:
    """Prometheus text."""
    text = state.metrics.render_exposition()
    await call.send_reply(200, text, {"content-type": "text/plain; version=1.0.0; charset=utf-8"})


async def answer_kv_event_sources(state: VllmState, call: HttpCall) -> None:
    """Where cache events are published, by data-parallel rank."""
    source = describe_event_source(state)
    await call.reply_json({} if source is None else {str(state.settings.rank): source})


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


async def answer_reset_prefix_cache(state: VllmState, call: HttpCall) -> None:
    """Forgets the prefixes unless something runs."""
    await call.reply_json({"success": state.runner.engine.reset_prefix_cache()})


async def answer_count_tokens(state: VllmState, call: HttpCall) -> None:
    """Anthropic's count."""
    body = await read_json(call)
    state.planner.check_model(body)
    count = len(state.prompts.encode_anthropic(body))
    await call.reply_json({"input_tokens": count, "context_management": {"original_input_tokens": count}})


async def answer_embeddings(state: VllmState, call: HttpCall) -> None:
    """Deterministic unit vectors, after the prefill their prompts cost."""
    if not state.settings.enable_embeddings:
        await call.reply_json({"detail": "Not Found"}, 404)
        return
    body = await read_json(call)
    prompts = state.prompts.encode_embeddings(body)
    plan = state.planner.plan({**body, "max_tokens": 1}, prompts, state.make_id())
    with state.runner.run_requests(plan.requests) as group:
        while not group.ended:
            await group.wait_for_change()
    if group.failed:
        raise engine_dead()
    await call.reply_json(
        {
            "id": f"embd-{plan.id}",
            "object": "list",
            "created": int(state.wall_clock()),
            "model": plan.model,
            "data": [
                {"index": number, "object": "embedding", "embedding": _embedding(prompt)}
                for number, prompt in enumerate(plan.prompts)
            ],
            "usage": {"prompt_tokens": plan.prompt_tokens, "total_tokens": plan.prompt_tokens, "completion_tokens": 0},
        }
    )


async def set_faults(state: VllmState, call: HttpCall) -> None:
    """Set the faults named in the body (the simulator's own route) and answer with all of them."""
    body = await read_json(call)
    try:
        values = state.faults.apply_changes(body, state.runner, state.publisher)
    except FaultError as error:
        raise VllmError(str(error)) from error
    await call.reply_json(values)


async def answer_state(state: VllmState, call: HttpCall) -> None:
    """Answer with load, calls per route and latest generations (the simulator's own route)."""
    figures = state.runner.engine.load
    await call.reply_json(
        {
            "running": figures.running,
            "waiting": figures.waiting,
            "kv_usage": figures.kv_usage,
            "in_flight": state.in_flight,
            "calls": dict(state.calls),
            "requests": list(state.requests),
            "published_batches": 0 if state.publisher is None else state.publisher.published,
            "faults": dataclasses.asdict(state.faults.values),
        }
    )


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


def _embedding(prompt: tuple[int, ...]) -> list[float]:
    raw = repr(prompt).encode()
    values = [xxhash.xxh3_64_intdigest(raw, seed=axis) / 2**63 - 1 for axis in range(_EMBEDDING_SIZE)]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]
