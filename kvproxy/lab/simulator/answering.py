"""Answers of simulated servers, whole or as a stream, with the faults that are switched on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.lab.simulator.engine_runner import EngineRunner, GenerationGroup
from kvproxy.lab.simulator.generation import Answer, Delta, GenerationPlan
from kvproxy.lab.simulator.json_app import HttpError, encode_json, run_while_connected
from kvproxy.lab.simulator.kv_event_publisher import KvEventPublisher
from kvproxy.lab.simulator.tokenizer import Tokenizer


class FaultError(ValueError):
    """An unknown fault, or a value of the wrong kind."""


@dataclass(slots=True)
class FaultValues:
    """Everything off by default. Seconds may be large: a stall ends early when the faults are changed. `stall_body_s`
    is between head and body of an answer that is not streamed.

    `fail_next` generation requests answer `fail_status`; `busy_next` answer vLLM's 503; a stream is cut hard after
    `cut_after_chunks` chunks (`cut_next` of them), or ends with vLLM's error event after `error_after_chunks`. Requests
    for `fail_path` answer `fail_status`.
    """

    stall_head_s: float = 0.0
    stall_first_byte_s: float = 0.0
    stall_body_s: float = 0.0
    stall_mid_stream_s: float = 0.0
    stall_mid_stream_after_chunks: int = 1
    slow_tokenize_s: float = 0.0
    slow_wake_s: float = 0.0
    fail_next: int = 0
    fail_status: int = 500
    fail_path: str = ""
    busy_next: int = 0
    cut_next: int = 0
    cut_after_chunks: int = 1
    error_next: int = 0
    error_after_chunks: int = 1
    no_tokenize: bool = False
    engine_dead: bool = False
    kv_fault: str = ""
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


class Shape(Protocol):
    """One API's words for an answer."""

    def build_body(self, answer: Answer) -> dict[str, Any]:
        """Return the whole body."""

    def build_events(self, answer: Answer, deltas: list[Delta], *, last: bool) -> Iterator[bytes]:
        """Events for what is new; `last` adds the end."""

    def build_error_events(self, body: Any) -> Iterator[bytes]:
        """Events that end a stream after the engine died."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Parts of a server that answer. `dead` makes the error of an engine that is gone."""

    runner: EngineRunner
    faults: Faults
    tokenizer: Tokenizer
    block_size: int
    wall_clock: Callable[[], float]
    dead: Callable[[], HttpError]
    #: Members of a whole answer that depend on how it went.
    extend: Callable[[Answer], dict[str, Any]] = lambda _: {}

    def answer(self, plan: GenerationPlan, shape: Shape, record: dict[str, Any]) -> ASGIApp:
        """Return the response, which generates as it is sent; `record` gets how it went. A client that leaves frees the
        engine at once."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await run_while_connected(receive, self._run(plan, shape, record, send))
            except ClientDisconnect:
                record["outcome"] = "disconnected"
            except HttpError:
                record["outcome"] = "error"
                raise

        return respond

    async def _run(self, plan: GenerationPlan, shape: Shape, record: dict[str, Any], send: Send) -> None:
        await self.faults.stall(self.faults.values.stall_head_s)
        with self.runner.run_requests(plan.requests) as group:
            created = int(self.wall_clock())
            answer = Answer(plan, group, tokenizer=self.tokenizer, block_size=self.block_size, created=created)
            if plan.stream:
                record["outcome"] = await _Stream(self, answer, group, shape, send).run()
            else:
                record["outcome"] = await self._whole(answer, group, shape, send)
            record["cached_tokens"] = answer.count_usage().cached_tokens

    async def _whole(self, answer: Answer, group: GenerationGroup, shape: Shape, send: Send) -> str:
        await group.wait_until_ended()
        if group.failed:
            raise self.dead()
        await self.faults.stall(self.faults.values.stall_first_byte_s)
        body = encode_json({**shape.build_body(answer), **self.extend(answer)})
        await send(make_head("application/json", length=len(body)))
        await self.faults.stall(self.faults.values.stall_body_s)
        await send({"type": "http.response.body", "body": body})
        return "finished"


def make_head(media_type: str, *, length: int | None = None) -> Message:
    """Return the beginning of a response with status 200."""
    headers = [(b"content-type", media_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


class _Stream:
    """One streamed answer: the head goes out at once, data when there is some. Without an end the server breaks the
    connection."""

    def __init__(self, serving: Serving, answer: Answer, group: GenerationGroup, shape: Shape, send: Send) -> None:
        self._serving = serving
        self._faults = serving.faults
        self._answer = answer
        self._group = group
        self._shape = shape
        self._send = send
        self._chunks = 0
        values = self._faults.values
        take = self._faults.use_up
        self._cut_after = values.cut_after_chunks if take("cut_next") else None
        self._error_after = values.error_after_chunks if take("error_next") else None
        #: A chunk for each token then, so that the place does not depend on the machine's speed.
        self._breaks = self._cut_after is not None or self._error_after is not None

    async def run(self) -> str:
        """How it went: finished, cut or error."""
        await self._send(make_head("text/event-stream; charset=utf-8"))
        await self._faults.stall(self._faults.values.stall_first_byte_s)
        ended = False
        while not ended:
            await self._group.wait_for_change()
            ended = self._group.ended
            if self._group.failed:
                return await self._die()
            deltas = self._answer.take_deltas(singly=self._breaks)
            for event in self._shape.build_events(self._answer, deltas, last=ended):
                outcome = await self._faulted()
                if outcome is not None:
                    return outcome
                await self._write(event)
                self._chunks += 1
        await self._write(b"", more=False)
        return "finished"

    async def _faulted(self) -> str | None:
        values = self._faults.values
        if self._cut_after is not None and self._chunks >= self._cut_after:
            return "cut"
        if self._error_after is not None and self._chunks >= self._error_after:
            return await self._die()
        if self._chunks == values.stall_mid_stream_after_chunks:
            await self._faults.stall(values.stall_mid_stream_s)
        return None

    async def _die(self) -> str:
        for event in self._shape.build_error_events(self._serving.dead().body):
            await self._write(event)
        await self._write(b"", more=False)
        return "error"

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
