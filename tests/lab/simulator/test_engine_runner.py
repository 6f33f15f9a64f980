"""An engine in real time, without a server around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import BlockStored, EngineOutput, KvEvent, SimRequest
from kvproxy.lab.simulator.engine_runner import EngineRunner, SequenceProgress
from tests.lab.simulator.support import FAST


class Heard:
    """Collects what the runner reports."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self.outputs: list[EngineOutput] = []

    async def on_events(self, events: Sequence[KvEvent]) -> None:
        self.events += events

    def on_output(self, generation: SequenceProgress, output: EngineOutput) -> None:
        self.outputs.append(output)


def runner(heard: Heard, capacity_blocks: int = 8) -> EngineRunner:
    """Return a fast engine on the real clock."""
    engine = Engine(replace(FAST, capacity_blocks=capacity_blocks))
    return EngineRunner(engine, clock=time.monotonic, on_events=heard.on_events, on_output=heard.on_output)


async def test_tokens_arrive_and_events_before_them() -> None:
    """The state of a generation is always the latest."""
    heard = Heard()
    async with runner(heard) as running:
        with running.run_requests([SimRequest("a", [1, 2], 70, 3)]) as group:
            while not group.ended:
                await group.wait_for_change()
            assert group.members[0].generated == 3
            assert not group.failed
    assert heard.events == [BlockStored((1, 2), None)]


async def test_an_impossible_request_fails() -> None:
    """A rejected request ends its generation instead of leaving it waiting."""
    async with runner(Heard(), capacity_blocks=1) as running:
        with running.run_requests([SimRequest("a", [], 700, 3)]) as group:
            await group.wait_for_change()
            assert group.failed


async def test_leaving_cancels() -> None:
    """The block's end frees the memory, also of outputs that come too late."""
    async with runner(Heard()) as running:
        with running.run_requests([SimRequest("a", [1], 40, 10**6)]):
            await asyncio.sleep(0)
        assert running.engine.load.running == running.engine.load.waiting == 0
        with running.run_requests([SimRequest("a", [1], 40, 2)]) as group:
            while not group.ended:
                await group.wait_for_change()


async def test_leaving_before_entering_is_harmless() -> None:
    """A runner that was never started has nothing to stop."""
    await runner(Heard()).__aexit__(None, None, None)


async def test_a_defect_in_the_loop_is_not_silent() -> None:
    """A waiting caller is told at once, and leaving raises what went wrong."""

    class Broken(Heard):
        def on_output(self, generation: SequenceProgress, output: EngineOutput) -> None:
            raise RuntimeError("broken")

    running = runner(Broken())
    await running.__aenter__()
    with running.run_requests([SimRequest("a", [1], 40, 2)]) as group:
        await group.wait_for_change()
        assert group.failed
    with pytest.raises(RuntimeError, match="broken"):
        await running.__aexit__(None, None, None)
