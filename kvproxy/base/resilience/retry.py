"""Retries: the pauses between them, the loop of background calls, and the budget that bounds those of requests."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from kvproxy.base.types import Clock, Sleep

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


@dataclass(slots=True)
class _Slot:
    """Requests and retries in one slice of the window."""

    index: int  # index of the slice of time
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Makes retries a share of recent requests, so that an outage is not multiplied. Pure.

    Allows `share` of the requests of the last `window_s` seconds, plus `min_per_second`, to be retried.

    The window slides in `slots` steps and holds that many numbers, whatever the traffic. `now` is monotonic seconds;
    a `now` before the latest seen one counts as that one.
    """

    def __init__(self, *, share: float, min_per_second: float, window_s: float = 10.0, slots: int = 10) -> None:
        self._share = share
        self._reserve = min_per_second * window_s
        self._slot_s = window_s / slots
        self._slots = slots
        self._window: deque[_Slot] = deque()
        self._requests = 0
        self._retries = 0
        self.began = self.made = 0  # requests and retries so far, for those that share the budget

    def count_request(self, now: float) -> None:
        """Count a request, once for all of its attempts."""
        window = self._window
        if window and int(now / self._slot_s) <= window[-1].index:
            window[-1].requests += 1
        else:
            self._slot(now).requests += 1
        self._requests += 1
        self.began += 1

    def withdraw_retry(self, now: float) -> bool:
        """Take one retry out of the budget; False when it is spent."""
        slot = self._slot(now)
        if self._retries + 1 > self._share * self._requests + self._reserve:
            return False
        slot.retries += 1
        self._retries += 1
        self.made += 1
        return True

    def count_others(self, requests: int, retries: int, now: float) -> None:
        """Count the requests and retries of another proxy with the same budget."""
        slot = self._slot(now)
        slot.requests += requests
        slot.retries += retries
        self._requests += requests
        self._retries += retries

    def _slot(self, now: float) -> _Slot:
        window = self._window
        index = int(now / self._slot_s)
        if window and index <= window[-1].index:
            return window[-1]
        while window and window[0].index <= index - self._slots:
            old = window.popleft()
            self._requests -= old.requests
            self._retries -= old.retries
        slot = _Slot(index)
        window.append(slot)
        return slot
