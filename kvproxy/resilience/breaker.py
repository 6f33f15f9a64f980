"""A circuit breaker for async calls: pybreaker decides and records, our clock and our probe slots frame it.

pybreaker must never see an `await` (it counts a cancellation as a failure, or, excluded, as a success), admits any
number of concurrent probes while half open, and reads the wall clock to leave the open state. So a call is admitted
first, awaited outside, and its outcome replayed synchronously; and the way from open to half open is ours alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

import pybreaker

from kvproxy.config.cluster_schema import BreakerSettings
from kvproxy.errors import BreakerOpen
from kvproxy.types import Clock

#: Longer than any process lives: pybreaker's own wall clock never reopens a breaker.
_NEVER_S = 86_400.0 * 36_500


class BreakerState(StrEnum):
    """Where a breaker stands; shown in status."""

    CLOSED = pybreaker.STATE_CLOSED
    OPEN = pybreaker.STATE_OPEN
    HALF_OPEN = pybreaker.STATE_HALF_OPEN


class Permit:
    """Leave to make one call. Its holder says once how the call ended; every further word is ignored.

    A verdict that arrives after the breaker changed its state judges a past era and counts nothing.
    """

    __slots__ = ("_breaker", "_era")

    def __init__(self, breaker: Breaker, era: int) -> None:
        self._breaker: Breaker | None = breaker
        self._era = era

    def success(self) -> None:
        """The call was answered."""
        if (breaker := self._breaker) is not None:
            self._breaker = None
            breaker._settle(self._era, True)

    def failure(self) -> None:
        """The call failed, and its target is to blame."""
        if (breaker := self._breaker) is not None:
            self._breaker = None
            breaker._settle(self._era, False)

    def cancelled(self) -> None:
        """The call ended without telling anything about its target."""
        if (breaker := self._breaker) is not None:
            self._breaker = None
            breaker._settle(self._era, None)


class Breaker:
    """Opens after `failure_threshold` failures in a row, lets probes through after `recovery_timeout`.

    While half open at most `half_open_max_calls` calls run at once; the first success closes it, the first failure
    opens it again. `on_change` is called whenever what `admits` answers may have changed for another reason than time.
    """

    def __init__(
        self,
        name: str,
        settings: BreakerSettings,
        *,
        clock: Clock,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._state = BreakerState.CLOSED
        self._era = 0  # counts state changes
        self._probes = 0  # running in this half-open era
        self._spotless = True  # nothing but successes since the last failure
        self._opened_at = -math.inf
        self._record = pybreaker.CircuitBreaker(
            fail_max=settings.failure_threshold,
            reset_timeout=_NEVER_S,
            name=name,
            listeners=[_Follower(self._follow)],
            throw_new_error_on_trip=False,
        )

    def __repr__(self) -> str:
        return f"<Breaker {self.name} {self._state}>"

    def reconfigure(self, settings: BreakerSettings) -> None:
        """Other bounds from now on; its state and what it counted stay."""
        self._settings = settings
        self._record.fail_max = settings.failure_threshold

    @property
    def state(self) -> BreakerState:
        """As last recorded; an open breaker whose time has come stays open until the first call asks."""
        return self._state

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return int(self._record.fail_counter)

    @property
    def admits(self) -> bool:
        """Whether `admit` would succeed now."""
        if self._state is BreakerState.CLOSED:
            return True
        if self._state is BreakerState.OPEN:
            return self._clock() >= self.reopens_at
        return self._probes < self._settings.half_open_max_calls

    @property
    def reopens_at(self) -> float:
        """When an open breaker begins to admit probes, on its clock; infinite in other states."""
        if self._state is not BreakerState.OPEN:
            return math.inf
        return self._opened_at + self._settings.recovery_timeout

    def admit(self) -> Permit:
        """Leave to make one call, or BreakerOpen. Never blocks."""
        if self._state is not BreakerState.CLOSED:
            self._admit_probe()
        return Permit(self, self._era)

    def _admit_probe(self) -> None:
        if not self.admits:
            raise BreakerOpen(f"breaker {self.name} is {self._state}")
        if self._state is BreakerState.OPEN:
            self._record.half_open()
        self._probes += 1
        if self._on_change is not None and self._probes >= self._settings.half_open_max_calls:
            self._on_change()

    def _settle(self, era: int, answered: bool | None) -> None:
        if era != self._era:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._probes -= 1
            if answered is None and self._on_change is not None:
                self._on_change()  # a probe slot is free again
        if answered:
            if not self._spotless:  # a success after successes changes nothing, and a replay costs more than a pick
                self._record.call(_succeed)
                self._spotless = True
        elif answered is not None:
            self._spotless = False
            with suppress(_Failed):
                self._record.call(_fail)

    def _follow(self, state: str) -> None:
        self._state = BreakerState(state)
        self._era += 1
        self._probes = 0
        if self._state is BreakerState.OPEN:
            self._opened_at = self._clock()
        if self._on_change is not None:
            self._on_change()


class _Failed(Exception):
    """Stands for the failure that is replayed to pybreaker."""


def _succeed() -> None:
    """A success, replayed."""


def _fail() -> None:
    raise _Failed


class _Follower(pybreaker.CircuitBreakerListener):
    """Hands pybreaker's state changes on."""

    def __init__(self, follow: Callable[[str], None]) -> None:
        self._follow = follow

    def state_change(
        self,
        cb: pybreaker.CircuitBreaker,
        old_state: pybreaker.CircuitBreakerState | None,
        new_state: pybreaker.CircuitBreakerState,
    ) -> None:
        """pybreaker's hook."""
        self._follow(new_state.name)
