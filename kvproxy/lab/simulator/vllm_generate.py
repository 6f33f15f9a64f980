"""The routes of a simulated vLLM that generate: answered whole or as a stream, with the faults that are switched on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvproxy.lab.simulator.engine_runner import GenerationGroup
from kvproxy.lab.simulator.generation import Answer, Delta, GenerationPlan
from kvproxy.lab.simulator.http_call import EVENT_STREAM, HttpCall
from kvproxy.lab.simulator.vllm_errors import (
    VllmError,
    bad_json,
    busy,
    engine_dead,
    unsupported_media_type,
    validation_errors,
)
from kvproxy.lab.simulator.vllm_state import VllmState

KEEP_ALIVE = b": keep-alive\n\n"


class Shape(Protocol):
    """One API's words for an answer."""

    def build_body(self, answer: Answer) -> dict[str, Any]:
        """Return the whole body."""

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Events for what is new; `last` adds the end."""

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """Events that end a stream after the engine died."""


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """How one API differs: where its prompts are, and how its answers look."""

    prompts: Callable[[VllmState, Mapping[str, Any]], list[list[int]]]
    shape: Callable[[VllmState], Shape]


async def read_json(call: HttpCall) -> dict[str, Any]:
    """Return the body as an object, or vLLM's error about it."""
    raw = await call.read_body()
    if "application/json" not in call.headers.get("content-type", ""):
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


async def answer_generation(state: VllmState, call: HttpCall, route: GenerateRoute) -> None:
    """One generation from body to last byte; a client that leaves frees the engine at once."""
    body = await read_json(call)
    state.planner.check_model(body)
    plan_id = call.headers.get("x-request-id") or body.get("request_id") or state.make_id()
    plan = state.planner.plan(body, route.prompts(state, body), str(plan_id))
    _admit(state)
    record = state.open_record(call.path, plan)
    call.reply_headers |= build_orca_header(state, call)
    state.in_flight += 1
    try:
        finished = await call.run_while_connected(_answer(state, call, plan, route.shape(state), record))
        if not finished:
            record["outcome"] = "disconnected"
    except VllmError:
        record["outcome"] = "error"
        raise
    finally:
        state.in_flight -= 1
        for request in plan.requests:
            state.metrics.forget_request(request.id)


def build_orca_header(state: VllmState, call: HttpCall) -> dict[str, str]:
    """Return the engine's load in the format the client asked for, if it asked."""
    wanted = call.headers.get("endpoint-load-metrics-format", "").upper()
    load = state.runner.engine.load
    figures = {"num_requests_waiting": float(load.waiting), "kv_cache_usage_perc": load.kv_usage}
    if wanted == "JSON":
        return {"endpoint-load-metrics": f"JSON {json.dumps({'named_metrics': figures})}"}
    if wanted == "TEXT":
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
        return {"endpoint-load-metrics": f"TEXT {text}"}
    return {}


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


async def _answer(state: VllmState, call: HttpCall, plan: GenerationPlan, shape: Shape, record: dict[str, Any]) -> None:
    await state.faults.stall(state.faults.values.stall_head_s)
    with state.runner.run_requests(plan.requests) as group:
        answer = Answer(
            plan,
            group,
            tokenizer=state.tokenizer,
            block_size=state.settings.engine.block_size,
            created=int(state.wall_clock()),
        )
        if plan.stream:
            record["outcome"] = await _Stream(state, call, answer, group, shape).run()
        else:
            record["outcome"] = await _whole(state, call, answer, group, shape)
        record["cached_tokens"] = answer.count_usage().cached_tokens


async def _whole(state: VllmState, call: HttpCall, answer: Answer, group: GenerationGroup, shape: Shape) -> str:
    while not group.ended:
        await group.wait_for_change()
    if group.failed:
        raise engine_dead()
    await state.faults.stall(state.faults.values.stall_first_byte_s)
    await call.reply_json(shape.build_body(answer))
    return "finished"


class _Stream:
    """One streamed answer: the head goes out at once, data when there is some."""

    def __init__(self, state: VllmState, call: HttpCall, answer: Answer, group: GenerationGroup, shape: Shape) -> None:
        self._state = state
        self._call = call
        self._answer = answer
        self._group = group
        self._shape = shape
        self._chunks = 0
        values = state.faults.values
        take = state.faults.use_up
        self._cut_after = values.cut_after_chunks if take("cut_next") else None
        self._error_after = values.error_after_chunks if take("error_next") else None

    async def run(self) -> str:
        """How it went: finished, cut or error."""
        await self._call.start_reply(200, EVENT_STREAM)
        await self._state.faults.stall(self._state.faults.values.stall_first_byte_s)
        ended = False
        while not ended:
            if not await self._group.wait_for_change(self._state.settings.sse_keep_alive_interval_s):
                await self._call.write_chunk(KEEP_ALIVE)
                continue
            ended = self._group.ended
            if self._group.failed:
                return await self._die()
            for event in self._shape.build_events(self._answer, self._answer.take_deltas(), last=ended):
                outcome = await self._faulted()
                if outcome is not None:
                    return outcome
                await self._call.write_chunk(event)
                self._chunks += 1
        await self._call.finish_reply()
        return "finished"

    async def _faulted(self) -> str | None:
        values = self._state.faults.values
        if self._cut_after is not None and self._chunks >= self._cut_after:
            return "cut"
        if self._error_after is not None and self._chunks >= self._error_after:
            return await self._die()
        if self._chunks == values.stall_mid_stream_after_chunks:
            await self._state.faults.stall(values.stall_mid_stream_s)
        return None

    async def _die(self) -> str:
        for event in self._shape.build_error_events(engine_dead().body):
            await self._call.write_chunk(event)
        await self._call.finish_reply()
        return "error"
