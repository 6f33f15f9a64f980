"""The routes of a simulated vLLM that generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from kvproxy.lab.simulator.answering import Serving, Shape
from kvproxy.lab.simulator.generation import Answer, GenerationPlan
from kvproxy.lab.simulator.vllm_errors import (
    VllmError,
    bad_json,
    busy,
    engine_dead,
    unsupported_media_type,
    validation_errors,
)
from kvproxy.lab.simulator.vllm_nixl import PARAMS, NixlSide
from kvproxy.lab.simulator.vllm_state import VllmState


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """How one API differs: where its prompts are, and how its answers look."""

    prompts: Callable[[VllmState, Mapping[str, Any]], list[list[int]]]
    shape: Callable[[VllmState], Shape]


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as an object, or vLLM's error about it."""
    raw = await request.body()
    if "application/json" not in request.headers.get("content-type", ""):
        raise unsupported_media_type()
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise bad_json(error) from error
    except UnicodeDecodeError as error:
        raise VllmError("There was an error parsing the body", kind="Bad Request") from error
    if not isinstance(body, dict):
        problem = {"type": "model_attributes_type", "loc": "body", "msg": "Input should be a valid dictionary"}
        raise validation_errors([problem])
    return body


async def answer_generation(state: VllmState, route: GenerateRoute, request: Request) -> ASGIApp:
    """Answer a request of one API."""
    return await generate(state, route, request, await read_json(request))


async def generate(state: VllmState, route: GenerateRoute, request: Request, body: dict[str, Any]) -> ASGIApp:
    """One generation from body to last byte; a client that leaves frees the engine at once."""
    state.planner.check_model(body)
    plan_id = request.headers.get("x-request-id") or body.get("request_id") or state.make_id()
    plan = state.planner.plan(body, route.prompts(state, body), str(plan_id))
    await state.awake.wait()
    _admit(state)
    params = body.get(PARAMS) or {}
    if state.nixl is not None and params.get("do_remote_prefill") and state.faults.values.kv_fault != "ignored":
        seen = await state.nixl.receive(request, plan, params)
        plan = state.planner.answer_by(plan, seen, params["remote_prefill_cached_tokens"])
    serving = Serving(
        state.runner,
        state.faults,
        state.tokenizer,
        state.settings.engine.block_size,
        state.wall_clock,
        engine_dead,
        extend=partial(_hold, state.nixl, plan) if state.nixl and params.get("do_remote_decode") else lambda _: {},
    )
    response = serving.answer(plan, route.shape(state), state.open_record(request.url.path, plan))
    return state.count_in(plan, response)


def _hold(side: NixlSide, plan: GenerationPlan, answer: Answer) -> dict[str, Any]:
    """Return the member by which a decoder pulls the prompt."""
    return {PARAMS: side.hold(plan.prompts[0], plan.id, answer.count_usage().cached_tokens)}


def _admit(state: VllmState) -> None:
    """Faults and queue bounds that turn a request away."""
    faults = state.faults
    if faults.values.engine_dead:
        raise engine_dead()
    if faults.use_up("fail_next"):
        status = faults.values.fail_status
        raise VllmError("Internal Server Error", kind="InternalServerError", code=status)
    if faults.use_up("busy_next"):
        raise busy()
    limit = state.settings.max_num_queued_reqs
    if limit is not None and state.runner.engine.load.waiting >= limit:
        state.metrics.count_rejection("max_num_queued_reqs")
        raise busy()
