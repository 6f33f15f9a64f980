"""One breaker an operation: what fails in the background never stops a lookup, and the other way round."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvproxy.base.errors import ClientError, NotSupported, Refused
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.breaker import Breaker, BreakerState
from kvproxy.base.settings.model import BreakerSettings
from kvproxy.base.types import Clock

T = TypeVar("T")

log = logging.getLogger("kvproxy.kvcache")

#: Consequence of a failing operation; otherwise that it is not done.
_BY_ROUTING = "with unknown tokens are matched by the approximate index alone"
_MEANING = {
    "lookup": "requests are routed by the approximate index and KV events alone",
    "tokenize": f"prompts {_BY_ROUTING}",
    "tokenize_messages": f"prompts of /v1/messages {_BY_ROUTING}",
    "tokenize_responses": f"prompts of /v1/responses {_BY_ROUTING}",
}


@dataclass(frozen=True, slots=True)
class Outage:
    """An operation whose service fails: its breaker opened and has not closed since."""

    operation: str
    since: float  # by the clock of the breakers
    last_error: str  # safe to show
    meaning: str


class OperationBreakers:
    """Breakers by operation name; names come from a closed set. An outage is logged as it begins and as it ends."""

    def __init__(self, settings: BreakerSettings, *, clock: Clock, metrics: Metrics) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._breakers: dict[str, Breaker] = {}
        self._errors: dict[str, ClientError] = {}  # the last one of each operation
        self._outages: dict[str, Outage] = {}

    def breaker(self, operation: str) -> Breaker:
        """Return the operation's breaker."""
        breaker = self._breakers.get(operation)
        if breaker is None:
            breaker = Breaker(
                f"kvcache/{operation}", self._settings, clock=self._clock, on_change=partial(self._changed, operation)
            )
            self._breakers[operation] = breaker
            gauge = self._metrics.group(BoundMetrics).breaker_state.labels(breaker.name)
            gauge.set_function(lambda: breaker.state is not BreakerState.CLOSED)
        return breaker

    def states(self) -> dict[str, str]:
        """State by operation, for status."""
        return {operation: breaker.state.value for operation, breaker in sorted(self._breakers.items())}

    def now(self) -> float:
        """Return the present time of the clock that dates outages."""
        return self._clock()

    @property
    def outages(self) -> Sequence[Outage]:
        """Present outages, the oldest first."""
        return tuple(self._outages.values())

    def admits(self, operation: str) -> bool:
        """Return True if a call would be let through now."""
        return self.breaker(operation).admits

    async def call(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call if its breaker lets it through; raises BreakerOpen, or the call's error.

        No answer and a broken one count against the service, and so does a route it does not have; a refusal of what
        was asked (4xx, an unknown instance) shows that it lives. Cancellation counts nothing."""
        permit = self.breaker(operation).admit()
        try:
            answer = await call()
            permit.record_success()
            return answer
        except ClientError as error:
            self._errors[operation] = error
            alive = isinstance(error, Refused) and error.status < 500 and not isinstance(error, NotSupported)
            (permit.record_success if alive else permit.record_failure)()
            raise
        finally:
            permit.record_cancellation()  # no effect after a verdict

    def _changed(self, operation: str) -> None:
        """Handle a breaker that may have opened or closed."""
        known = self._outages.get(operation)
        closed = self._breakers[operation].state is BreakerState.CLOSED
        error = self._errors.get(operation)
        if known is not None and closed:
            del self._outages[operation]
            log.info("[kvcache] %s works again after %.0f s", operation, self._clock() - known.since)
        elif known is None and not closed and error is not None and not isinstance(error, NotSupported):
            meaning = _MEANING.get(operation, f"no {operation} is done")
            self._outages[operation] = Outage(operation, self._clock(), str(error), meaning)
            log.warning(
                "[kvcache] %s failed %d times in a row (%s): %s; it is tried again every %g s",
                operation,
                self._settings.failure_threshold,
                error,
                meaning,
                self._settings.recovery_timeout,
            )
        elif known is not None and error is not None:
            self._outages[operation] = replace(known, last_error=str(error))
