"""Parts that only an earlier generation needed end when its last request is over, or when patience is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from kvproxy.operate.runtime.generation import Generation, Reloader, StateStore
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
    return cast("Generation", SimpleNamespace(parts=list(parts), states=StateStore().draft_states(), running=running))


async def settle() -> None:
    """Whatever would be done at once is done."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_of_an_earlier_generation_finish_first(clock: FakeClock) -> None:
    """Its own parts stay until then; shared ones stay anyway."""
    old, shared = Part(), Part()
    before, after = generation(old, shared, running=1), generation(shared)
    async with Reloader(clock=clock, patience_s=10) as reloader:
        await reloader.begin_generation(before)
        await reloader.begin_generation(after)
        reloader.retire_generation(before)
        await settle()
        assert old.running
        before.running = 0
        await until(lambda: not old.running)
        assert shared.running


async def test_patience_has_an_end(clock: FakeClock) -> None:
    """A stream that never ends does not keep a configuration for ever."""
    old = Part()
    before = generation(old, running=1)
    async with Reloader(clock=clock, patience_s=10) as reloader:
        await reloader.begin_generation(before)
        reloader.retire_generation(before)
        await settle()
        assert old.running
        clock.advance(10.0)
        await until(lambda: not old.running)


async def test_a_part_that_a_later_generation_takes_up_again_goes_on(clock: FakeClock) -> None:
    """Though the one between them did without it."""
    part = Part()
    first, between, third = generation(part, running=1), generation(), generation(part)
    async with Reloader(clock=clock, patience_s=10) as reloader:
        for each in (first, between, third):
            await reloader.begin_generation(each)
        reloader.retire_generation(first)
        reloader.retire_generation(between)
        first.running = 0
        await until(lambda: reloader.ended == 2)
        assert part.running
    assert not part.running


async def test_a_generation_that_cannot_start_ends_what_it_had_started(clock: FakeClock) -> None:
    """And leaves what another one runs."""

    class Unlucky(Part):
        async def __aenter__(self) -> Self:
            raise RuntimeError("no luck today")

    own, shared = Part(), Part()
    async with Reloader(clock=clock, patience_s=10) as reloader:
        await reloader.begin_generation(generation(shared))
        with pytest.raises(RuntimeError):
            await reloader.begin_generation(generation(shared, own, Unlucky()))
        assert (shared.running, own.running) == (True, False)
