"""What only an earlier generation needed ends when its last request is over, or when patience is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self, cast

from kvproxy.runtime.generation import Generation
from kvproxy.runtime.reload import Reloader
from tests.support.clock import FakeClock
from tests.support.until import until


class Part:
    """Something that runs."""

    def __init__(self) -> None:
        self.running = False

    async def __aenter__(self) -> Self:
        self.running = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.running = False


def generation(*parts: Part, running: int = 0) -> Any:
    return cast("Generation", SimpleNamespace(parts=list(parts), clusters={}, running=running))


async def settle() -> None:
    """Whatever would be done at once is done."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_of_an_earlier_generation_finish_first(clock: FakeClock) -> None:
    """Its own parts stay until then; shared ones stay anyway."""
    old, shared = Part(), Part()
    before, after = generation(old, shared, running=1), generation(shared)
    async with Reloader(clock=clock, patience_s=10) as succession:
        await succession.begin(before)
        succession.retire(before, after)
        await settle()
        assert old.running
        before.running = 0
        await until(lambda: not old.running)
        assert shared.running


async def test_patience_has_an_end(clock: FakeClock) -> None:
    """A stream that never ends does not keep a configuration for ever."""
    old = Part()
    before = generation(old, running=1)
    async with Reloader(clock=clock, patience_s=10) as succession:
        await succession.begin(before)
        succession.retire(before, generation())
        await settle()
        assert old.running
        clock.advance(10.0)
        await until(lambda: not old.running)
