"""Further attempts: whether and where a request is sent again once one failed, and which endpoints are to blame."""

from __future__ import annotations

import enum
import random

import msgspec
from starlette.types import Scope

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.retry import RetryBudget
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.proxy.forward.answer import RetryState
from kvproxy.proxy.forward.request_body import RequestBody
from kvproxy.proxy.metrics import RequestMetrics
from kvproxy.proxy.placement import NO_ENDPOINTS
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver, notify
from kvproxy.proxy.settings import RetrySettings

_IDEMPOTENT = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})


class Next(enum.Enum):
    """Step that follows an attempt."""

    DELIVERED = enum.auto()
    RETRY = enum.auto()
    RESUME = enum.auto()  # a stream that broke goes on with a request of its own
    GIVE_UP = enum.auto()


class Retries(msgspec.Struct, eq=False):
    """Further attempts of one request: within the attempts, the retry budget and what may safely be sent twice."""

    _settings: RetrySettings
    _budget: RetryBudget
    _metrics: Metrics
    _clock: Clock
    _rng: random.Random
    _exchange: Exchange
    _cluster: Cluster
    _model: str
    _method: bytes
    _body: RequestBody
    holder: EndpointId | None = None  # endpoint with the history, once another one proved to lack it
    lost: frozenset[EndpointId] = NO_ENDPOINTS  # endpoints that a stream of this request broke at
    moves: int = 0  # of the stream, off endpoints that did not fail
    _earlier: RetryState | None = None  # set once an attempt failed

    def find_refusal(self, *, unprocessed: bool) -> str:
        """Return why the request may not be sent again, a metric label; "" if it may, which is then taken from the
        budget."""
        safe = unprocessed or self._exchange.inference is not None or self._method in _IDEMPOTENT
        if not (safe and self._body.replayable):
            return "not_replayable"
        if self._exchange.outcome.attempts - self.moves >= self._settings.attempts:
            return "attempts"
        if self.lost and not unprocessed:  # the prompt itself may have killed both engines
            return "engines_lost"
        now = self._clock()
        if self._cluster.verdicts.has_outage(self._model, now):
            return "outage"
        return "" if self._budget.withdraw_retry(now) else "budget"

    def may_send_twice(self) -> bool:
        """Return whether the request may be sent to a second engine beside the first, which is then an attempt."""
        if self.find_refusal(unprocessed=False):
            return False
        self._exchange.outcome.attempts += 1
        return True

    def note_failure(self, reason: str, refusal: str) -> Next:
        """Count a failed attempt, and the retry that follows it or its refusal."""
        notify(RequestObserver.attempt_failed, self._exchange, reason, self._clock())
        group = self._metrics.group(RequestMetrics)
        if refusal:
            group.retries_refused.labels(refusal).inc()
            return Next.GIVE_UP
        group.retries.labels(reason).inc()
        return Next.RETRY

    def count_failure(self, endpoint: Endpoint) -> float | None:
        """As of RetryState."""
        if self._earlier is None:
            self._earlier = RetryState(rng=self._rng)
        return self._earlier.count_failure(endpoint)

    def next_round(self) -> float | None:
        """As of RetryState."""
        return None if self._earlier is None else self._earlier.next_round()

    def list_places(self) -> tuple[frozenset[EndpointId], EndpointId | None]:
        """Return the endpoints that the next attempt is not to go to, and the one that it is to go to, if any."""
        earlier = self._earlier
        if earlier is None:
            return self.lost, None
        return self.lost | earlier.excluded, earlier.again or self.holder


class Suspects(msgspec.Struct, eq=False):
    """Endpoints of failed attempts of one request: they are to blame if another one serves it."""

    _cluster: Cluster
    _model: str
    _exchange: Exchange
    _scope: Scope
    undecided: list[tuple[Pick, str]] = []  # failed attempts, and how

    def add(self, pick: Pick, how: str, now: float) -> None:
        """Suspect the endpoint of a failed attempt."""
        pick.suspend(now)
        self.undecided.append((pick, how))

    def blame(self, now: float, *, proven: bool = False) -> None:
        """Blame them, unless the request failed in the same way on several and none served it."""
        verdicts = self._cluster.verdicts
        undecided = self.undecided
        self.undecided = []
        for pick, how in undecided:
            shared = not proven and any(
                kind == how and one.endpoint.engine is not pick.endpoint.engine for one, kind in undecided
            )
            if shared:
                verdicts.record_shared_failure(how, now)
            spared = shared or (not proven and self.is_spared(pick.endpoint, how, now))
            pick.blame(AttemptOutcome.UNPROVEN if spared else AttemptOutcome.FAILURE, now)

    def is_spared(self, endpoint: Endpoint, reason: str, now: float) -> bool:
        """Return whether the endpoint is not to blame, as of the cluster's verdicts."""
        address = self._scope.get("client")
        client = self._exchange.tenant or (str(address[0]) if address else "")
        return self._cluster.verdicts.is_spared(endpoint, self._model, reason=reason, client=client, now=now)
