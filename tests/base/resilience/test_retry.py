"""Full-jitter pauses and the retry loop of background calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from kvproxy.base.resilience.retry import full_jitter_s, retry_background
from tests.support.clock import FakeClock


class Retryable(Exception):
    """An error worth another try."""


class Highest(random.Random):
    """Always draws the top of a range."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Script:
    """A call that raises or returns what it was given, in order."""

    def __init__(self, *steps: Exception | str) -> None:
        self.steps = list(steps)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


class Sleeper:
    """A sleep that only moves the fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.pauses: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)


@pytest.mark.parametrize(
    ("retry", "top"), [(0, 0.1), (1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (50, 1.0), (10_000, 1.0)]
)
def test_the_pause_doubles_up_to_its_cap(retry: int, top: float) -> None:
    """The n-th pause is drawn from 0 to base * 2**(n-1), at most the cap."""
    assert full_jitter_s(retry, base_s=0.1, max_s=1.0, rng=Highest()) == pytest.approx(top)


def test_the_pause_is_drawn_from_the_whole_range() -> None:
    """Full jitter: the mean is half of the top, and the bottom is reached."""
    rng = random.Random(1)
    pauses = [full_jitter_s(3, base_s=0.1, max_s=10, rng=rng) for _ in range(2000)]
    assert min(pauses) < 0.01
    assert max(pauses) > 0.39
    assert sum(pauses) / len(pauses) == pytest.approx(0.2, rel=0.1)


async def run(script: Callable[[], object], clock: FakeClock, sleeper: Sleeper, **kwargs: float) -> object:
    settings = {"attempts": 4, "deadline_s": 10.0, "base_s": 0.1, "max_s": 2.0, **kwargs}
    return await retry_background(
        script,  # type: ignore[arg-type]
        **settings,  # type: ignore[arg-type]
        retry_on=(Retryable,),
        rng=Highest(),
        clock=clock,
        sleep=sleeper,
    )


async def test_a_first_success_waits_for_nothing(clock: FakeClock) -> None:
    """No pause, one call."""
    script, sleeper = Script("done"), Sleeper(clock)
    assert await run(script, clock, sleeper) == "done"
    assert (script.calls, sleeper.pauses) == (1, [])


async def test_retryable_errors_are_retried_with_growing_pauses(clock: FakeClock) -> None:
    """The attempt already made counts as the first."""
    script, sleeper = Script(Retryable(), Retryable(), Retryable(), "done"), Sleeper(clock)
    assert await run(script, clock, sleeper) == "done"
    assert sleeper.pauses == pytest.approx([0.1, 0.2, 0.4])


async def test_a_call_may_be_any_callable_that_gives_an_awaitable(clock: FakeClock) -> None:
    """Callers hand in partials and lambdas; the answer is what was awaited."""
    script = Script(Retryable(), "done")
    assert await run(lambda: script(), clock, Sleeper(clock)) == "done"
    assert script.calls == 2


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_gives_up_after_its_attempts_with_the_last_error(clock: FakeClock, attempts: int) -> None:
    """The caller sees the engine's own error, not the loop's."""
    errors = [Retryable(str(n)) for n in range(4)]
    script = Script(*errors)
    with pytest.raises(Retryable, match=str(attempts - 1)):
        await run(script, clock, Sleeper(clock), attempts=attempts)
    assert script.calls == attempts


@pytest.mark.parametrize("failures_before", [0, 1])
async def test_other_errors_are_not_retried(clock: FakeClock, failures_before: int) -> None:
    """A bug is not cured by repetition, at the first attempt or later."""
    script = Script(*[Retryable()] * failures_before, KeyError("bug"))
    with pytest.raises(KeyError):
        await run(script, clock, Sleeper(clock))
    assert script.calls == failures_before + 1


async def test_does_not_sleep_past_the_deadline(clock: FakeClock) -> None:
    """A pause that would end at or after the deadline is not begun."""
    script, sleeper = Script(Retryable("a"), Retryable("b"), "never"), Sleeper(clock)
    with pytest.raises(Retryable, match="b"):
        await run(script, clock, sleeper, deadline_s=2.5, base_s=1.0, max_s=8.0)
    assert sleeper.pauses == [1.0]


async def test_a_call_that_hangs_ends_at_the_deadline(clock: FakeClock) -> None:
    """The deadline bounds the calls too, not only the pauses between them."""
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        await run(hang, clock, Sleeper(clock), deadline_s=0.01)
    assert cancelled.is_set()


async def test_cancellation_passes_through(clock: FakeClock) -> None:
    """Shutdown ends the loop at once, in a call as in a pause."""
    sleeping = asyncio.Event()

    async def sleep_for_ever(_seconds: float) -> None:
        sleeping.set()
        await asyncio.Event().wait()

    script = Script(Retryable(), "never")
    task = asyncio.create_task(
        retry_background(
            script,
            attempts=3,
            deadline_s=10,
            base_s=0.1,
            max_s=1,
            retry_on=(Retryable,),
            rng=Highest(),
            clock=clock,
            sleep=sleep_for_ever,
        ),
        name="retry",
    )
    await sleeping.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.calls == 1
