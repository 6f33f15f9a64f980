"""Pauses between attempts, and the retry loop of background calls.

The request path never comes here for more than `full_jitter_s`: its attempts are bounded by the retry budget.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from kvproxy.types import Clock, Sleep

T = TypeVar("T")

#: Doublings after which a pause is at its cap whatever the base; keeps 2**n small.
_MAX_DOUBLINGS = 32


def full_jitter_s(retry: int, *, base_s: float, max_s: float, rng: random.Random) -> float:
    """Seconds to wait before the n-th retry (from 1): uniform between 0 and base doubled n-1 times, at most `max_s`.

    The whole range is drawn from, because clients that failed together must not come back together.
    """
    doublings = min(max(retry - 1, 0), _MAX_DOUBLINGS)
    return rng.uniform(0.0, min(max_s, base_s * 2**doublings))


async def retry_background(
    call: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    deadline_s: float,
    base_s: float,
    max_s: float,
    retry_on: tuple[type[Exception], ...],
    rng: random.Random,
    clock: Clock,
    sleep: Sleep = asyncio.sleep,
) -> T:
    """Call until it succeeds, at most `attempts` times and for at most `deadline_s` in all; for background work only.

    Only errors in `retry_on` are retried; the last one is raised when attempts are used up or the next pause would
    pass the deadline. A call still running at the deadline is cancelled and TimeoutError raised. tenacity takes
    some 50 us even where the first call succeeds: nothing beside a request to a helper service, too much for a pick.
    """
    give_up_at = clock() + deadline_s
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(retry_on),
        wait=lambda state: full_jitter_s(state.attempt_number, base_s=base_s, max_s=max_s, rng=rng),
        stop=lambda state: state.attempt_number >= attempts or clock() + state.upcoming_sleep >= give_up_at,
        sleep=sleep,
        reraise=True,
    )

    async def attempt() -> T:  # tenacity awaits only what it sees to be a coroutine function, which a partial is not
        return await call()

    async with asyncio.timeout(deadline_s):
        return await retrying(attempt)
