"""Runs a simulated engine in real time: wakes when there is work and hands tokens to the requests that wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import (
    CacheChanged,
    EngineOutput,
    Finished,
    FirstToken,
    KvEvent,
    Rejected,
    SimRequest,
    Tokens,
)

OnEvents = Callable[[Sequence[KvEvent]], Awaitable[None]]
OnOutput = Callable[["SequenceProgress", EngineOutput], None]


class SequenceProgress:
    """One sequence as its client sees it: always the latest state, so that a slow reader costs nothing."""

    def __init__(self, request: SimRequest, changed: asyncio.Event) -> None:
        self.request = request
        self.first: FirstToken | None = None
        self.finished: Finished | None = None
        self.failed = False
        self.generated = 0
        self._changed = changed

    @property
    def ended(self) -> bool:
        """No more tokens will come."""
        return self.finished is not None or self.failed

    def apply(self, output: EngineOutput) -> None:
        """Take in one output of the engine."""
        match output:
            case FirstToken():
                self.first = output
            case Tokens():
                self.generated = output.generated
            case Finished():
                self.finished = output
            case Rejected():
                self.failed = True
        self._changed.set()

    def fail(self) -> None:
        """Fail the sequence, since the engine is gone."""
        self.failed = True
        self._changed.set()


class GenerationGroup:
    """The sequences of one client request."""

    def __init__(self, requests: Sequence[SimRequest]) -> None:
        self._changed = asyncio.Event()
        self.members = [SequenceProgress(request, self._changed) for request in requests]

    @property
    def ended(self) -> bool:
        return all(member.ended for member in self.members)

    @property
    def failed(self) -> bool:
        """The engine gave up on one of them."""
        return any(member.failed for member in self.members)

    async def wait_until_ended(self) -> None:
        while not self.ended:
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for news."""
        await self._changed.wait()
        self._changed.clear()


class EngineRunner:
    """An async context manager around one engine and its loop task."""

    def __init__(self, engine: Engine, *, clock: Clock, on_events: OnEvents | None, on_output: OnOutput) -> None:
        self.engine = engine
        self._clock = clock
        self._on_events = on_events
        self._on_output = on_output
        self._live: dict[str, SequenceProgress] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineRunner:
        self._task = asyncio.create_task(self._run(), name="simulated engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    @contextlib.contextmanager
    def run_requests(self, requests: Sequence[SimRequest]) -> Iterator[GenerationGroup]:
        """Submit the requests; leaving the block cancels unfinished ones, which frees their memory at once."""
        group = GenerationGroup(requests)
        try:
            for member in group.members:
                self._live[member.request.id] = member
                self.engine.submit(member.request, self._clock())
            self._wake.set()
            yield group
        finally:
            for member in group.members:
                self._live.pop(member.request.id, None)
                self.engine.cancel(member.request.id, self._clock())
            self._wake.set()

    def receive(self, block_hashes: Sequence[int]) -> None:
        """Take in copies of a prompt's leading blocks from another engine."""
        self.engine.receive(block_hashes, self._clock())

    def kill(self) -> None:
        """Kill the engine process: every sequence fails now."""
        for request_id, generation in list(self._live.items()):
            self.engine.cancel(request_id, self._clock())
            generation.fail()

    async def _run(self) -> None:
        try:
            while True:
                await self._run_once()
        finally:
            self.kill()  # or the requests that still wait would wait for ever

    async def _run_once(self) -> None:
        self._wake.clear()
        moment = self.engine.next_event_at()
        timeout_s = None if moment is None else max(0.0, moment - self._clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        for output in self.engine.advance(self._clock()):
            await self._deliver(output)

    async def _deliver(self, output: EngineOutput) -> None:
        if isinstance(output, CacheChanged):
            if self._on_events is not None:
                await self._on_events(output.events)
            return
        generation = self._live.get(output.request_id)
        if generation is not None:
            self._on_output(generation, output)
            generation.apply(output)
