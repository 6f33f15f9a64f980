"""Requests that wait because there is no endpoint at all: until a source finds one, within a bound and a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvproxy.base.errors import QueueFull
from kvproxy.base.types import Clock

AnswerT = TypeVar("AnswerT")

#: Requests released within one turn of the event loop.
_LET_IN_A_TURN = 8


@dataclass(slots=True, eq=False)
class _Place:
    """A request that waits."""

    own_s: float  # prefill seconds without any cached token
    since: float
    called: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False  # its wait is over

    def end(self) -> None:
        """End the wait at its deadline."""
        self.over = True
        self.called.set()


class EndpointWait(Generic[AnswerT]):
    """In order of arrival. `limit` and `max_wait_s` are read when a request comes."""

    def __init__(self, limit: int, max_wait_s: float, *, clock: Clock) -> None:
        self.limit = limit
        self.max_wait_s = max_wait_s
        self._clock = clock
        self._places: dict[_Place, None] = {}

    def __len__(self) -> int:
        """Return requests waiting."""
        return len(self._places)

    @property
    def pending_s(self) -> float:
        """Prefill seconds of all of them together."""
        return sum(place.own_s for place in [*self._places])

    def oldest_wait_s(self, now: float) -> float:
        """How long the first of them has waited; 0 for none."""
        return next((now - place.since for place in [*self._places][:1]), 0.0)

    async def wait(self, ask: Callable[[float], AnswerT | None], own_s: float) -> AnswerT | None:
        """Return the first result of `ask` that is not None, called whenever there may be an endpoint; None at the
        deadline. The answer is of this turn of the event loop. Raises QueueFull."""
        now = self._clock()
        if len(self._places) >= self.limit:
            raise QueueFull(max(1.0, self.max_wait_s - self.oldest_wait_s(now)))
        place = _Place(own_s, now)
        self._places[place] = None
        expiry = asyncio.get_running_loop().call_later(self.max_wait_s, place.end)
        try:
            while True:
                await place.called.wait()
                place.called.clear()
                answer = ask(self._clock())
                if answer is not None or place.over:
                    return answer
        finally:
            expiry.cancel()
            del self._places[place]

    def let_in(self) -> None:
        """Let waiting requests try again, since there may be an endpoint: a few per turn of the event loop, the first
        ones first."""
        if self._places:
            self._call(deque(self._places))

    def _call(self, places: deque[_Place]) -> None:
        for _ in range(min(_LET_IN_A_TURN, len(places))):
            places.popleft().called.set()
        if places:
            asyncio.get_running_loop().call_soon(self._call, places)
