"""One breaker an operation: what fails in the background never stops a lookup, and the other way round."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvproxy.config import schema
from kvproxy.errors import ClientError, NotSupported, Refused
from kvproxy.metrics.catalog import Metrics
from kvproxy.resilience.breaker import Breaker, BreakerState
from kvproxy.types import Clock

T = TypeVar("T")


class Guard:
    """Breakers by operation name; names come from a closed set."""

    def __init__(self, settings: schema.Breaker, *, clock: Clock, metrics: Metrics) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._breakers: dict[str, Breaker] = {}

    def breaker(self, operation: str) -> Breaker:
        """The operation's breaker."""
        breaker = self._breakers.get(operation)
        if breaker is None:
            breaker = Breaker(f"kvcache/{operation}", self._settings, clock=self._clock)
            self._breakers[operation] = breaker
            gauge = self._metrics.breaker_state.labels(breaker.name)
            gauge.set_function(lambda: breaker.state is not BreakerState.CLOSED)
        return breaker

    def states(self) -> dict[str, str]:
        """State by operation, for status."""
        return {operation: breaker.state.value for operation, breaker in sorted(self._breakers.items())}

    def admits(self, operation: str) -> bool:
        """Whether a call would be let through now."""
        return self.breaker(operation).admits

    async def call(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call if its breaker lets it through; raises BreakerOpen, or what the call raised.

        No answer and a broken one count against the service, and so does a route it does not have; a refusal of what
        was asked (4xx, an unknown instance) shows that it lives. Cancellation counts nothing.
        """
        permit = self.breaker(operation).admit()
        try:
            answer = await call()
            permit.success()
            return answer
        except ClientError as error:
            alive = isinstance(error, Refused) and error.status < 500 and not isinstance(error, NotSupported)
            (permit.success if alive else permit.failure)()
            raise
        finally:
            permit.cancelled()  # means nothing once a verdict was given
