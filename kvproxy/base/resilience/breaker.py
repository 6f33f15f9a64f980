"""A circuit breaker for async calls: pybreaker holds the state and the count, our clock and our probe slots frame it.

pybreaker's own `call` must never see an `await` (it counts a cancellation as a failure, or, excluded, as a success),
admits any number of probes at once while half open, and leaves the open state by the wall clock. So a call is admitted
here, awaited outside, and its outcome recorded in pybreaker's storage; `open`, `half_open` and `close` are pybreaker's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from enum import StrEnum
from types import ModuleType

import msgspec

from kvproxy.base.errors import BreakerOpen
from kvproxy.base.settings.model import BreakerSettings
from kvproxy.base.types import Clock


def _load_pybreaker() -> ModuleType:
    """pybreaker without the Redis client, which it imports wherever that is installed: three times its own cost and all
    of OpenTelemetry's interface, for a storage that is not used here. Others in the process get a pybreaker of their
    own, with all it can do."""
    shared = "redis" in sys.modules or "pybreaker" in sys.modules
    if not shared:
        sys.modules["redis"] = None  # type: ignore[assignment]  # the import system's way to say: not installed
    try:
        import pybreaker
    finally:
        if not shared:
            del sys.modules["redis"]
            sys.modules.pop("pybreaker", None)
    return pybreaker


pybreaker = _load_pybreaker()

#: Calls let through at once while half open.
HALF_OPEN_CALLS = 2


class BreakerState(StrEnum):
    """Where a breaker stands; shown in status."""

    CLOSED = pybreaker.STATE_CLOSED
    OPEN = pybreaker.STATE_OPEN
    HALF_OPEN = pybreaker.STATE_HALF_OPEN


class Permit(msgspec.Struct, eq=False):
    """Leave to make one call. The first of its three methods that is called settles it; later ones change nothing.

    An outcome that arrives after the breaker changed its state belongs to a past era and counts nothing.
    """

    breaker: Breaker | None  # None: settled
    era: int

    def record_success(self) -> None:
        """Record that the call was answered."""
        if (breaker := self.breaker) is not None:
            self.breaker = None
            breaker._settle(self.era, True)

    def record_failure(self) -> None:
        """Record that the call failed through its target."""
        if (breaker := self.breaker) is not None:
            self.breaker = None
            breaker._settle(self.era, False)

    def record_cancellation(self) -> None:
        """Record that the call ended without a word about its target."""
        if (breaker := self.breaker) is not None:
            self.breaker = None
            breaker._settle(self.era, None)


class Breaker:
    """Opens after `failure_threshold` failures in a row, lets probes through after `recovery_timeout`.

    While half open at most HALF_OPEN_CALLS calls run at once; the first success closes it, the first failure
    opens it again. `settings` may be replaced at any time: other bounds count from then on, and permits that are out
    stay good. `on_change` is called whenever what `admits` answers may have changed for another reason than time.
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
        self.settings = settings
        self._clock = clock
        self._on_change = on_change
        #: As last recorded: an expired open breaker stays open until the next call.
        self.state = BreakerState.CLOSED
        self._era = 0  # counts state changes
        self._probes = 0  # running in this half-open era
        self._opened_at = -math.inf
        self._counts = pybreaker.CircuitMemoryStorage(pybreaker.STATE_CLOSED)
        self._circuit = pybreaker.CircuitBreaker(settings.failure_threshold, state_storage=self._counts, name=name)

    def __repr__(self) -> str:
        return f"<Breaker {self.name} {self.state}>"

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return int(self._counts.counter)

    @property
    def admits(self) -> bool:
        """True if `admit` would succeed now."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN:
            return self._clock() >= self.reopens_at
        return self._probes < HALF_OPEN_CALLS

    @property
    def reopens_at(self) -> float:
        """When an open breaker begins to admit probes, on its clock; infinite in other states."""
        if self.state is not BreakerState.OPEN:
            return math.inf
        return self._opened_at + self.settings.recovery_timeout

    def admit(self) -> Permit:
        """Leave to make one call, or BreakerOpen. Never blocks."""
        if self.state is not BreakerState.CLOSED:
            self._admit_probe()
        return Permit(self, self._era)

    def _admit_probe(self) -> None:
        if not self.admits:
            raise BreakerOpen(f"breaker {self.name} is {self.state}")
        if self.state is BreakerState.OPEN:
            self._change_state(self._circuit.half_open)
        self._probes += 1
        if self._on_change is not None and self._probes >= HALF_OPEN_CALLS:
            self._on_change()

    def _settle(self, era: int, answered: bool | None) -> None:
        if era != self._era:
            return
        probe = self.state is BreakerState.HALF_OPEN
        if probe:
            self._probes -= 1
        if answered is None:
            if probe and self._on_change is not None:
                self._on_change()  # a probe slot is free again
        elif not answered:
            self._counts.increment_counter()
            if probe or self._counts.counter >= self.settings.failure_threshold:
                self._change_state(self._circuit.open)
        elif probe:
            self._change_state(self._circuit.close)
        else:
            self._counts.reset_counter()

    def _change_state(self, transition: Callable[[], object]) -> None:
        transition()
        self.state = BreakerState(self._circuit.current_state)
        self._era += 1
        self._probes = 0
        if self.state is BreakerState.OPEN:
            self._opened_at = self._clock()
        if self._on_change is not None:
            self._on_change()
