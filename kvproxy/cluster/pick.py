"""One placement: which endpoint, why, and the share of its load that is ours until the request is over."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from kvproxy.base.resilience.breaker import BreakerState, Permit
from kvproxy.base.types import EndpointId, count_lower, cut_lower
from kvproxy.cluster.adapters import Placement
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.routing.admission import Stay
from kvproxy.cluster.routing.costs import own_s
from kvproxy.cluster.routing.load import Reservation
from kvproxy.cluster.routing.policy import Ledgered, Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import PromptSplit


class AttemptOutcome(StrEnum):
    """How an attempt ended, by its meaning for the endpoint."""

    SUCCESS = "success"
    CLIENT_ERROR = "client_error"  # the engine answered 4xx: alive, the request was wrong
    BUSY = "busy"  # the engine answered 503 "busy": alive, but try another one
    FAILURE = "failure"  # connect errors, other 5xx, timeouts, streams that broke
    UNPROVEN = "unproven"  # the same, but the request may be to blame: no endpoint does better
    CANCELLED = "cancelled"  # the client left


_UNSERVED = frozenset({AttemptOutcome.BUSY, AttemptOutcome.FAILURE, AttemptOutcome.UNPROVEN})


class HealthRecorder(Protocol):
    """Receiver of the attempts' outcomes."""

    def record_outcome(self, engine: Engine, outcome: AttemptOutcome, now: float) -> None: ...
    def follow_outage(self, now: float) -> None: ...


class LoadListener(Protocol):
    """A queue whose requests wait for less load."""

    def on_load_decrease(self) -> None: ...


class ReuseListener(Protocol):
    """Policies that learn which cached tokens engines reused."""

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None: ...


class PickOwner(Protocol):
    """The cluster, as a pick sees it."""

    @property
    def verdicts(self) -> HealthRecorder: ...
    @property
    def queue(self) -> LoadListener | None: ...
    @property
    def policies(self) -> ReuseListener: ...
    def on_release(self, endpoint: Endpoint, now: float) -> None: ...


class Pick(msgspec.Struct, eq=False):
    """A reserved place on an endpoint. Its holder settles it on every way out, best in a `finally`."""

    decision: Decision[Endpoint]
    endpoint: Endpoint  # chosen by the decision
    reservation: Reservation
    permit: Permit | None  # None: picked in panic past an open breaker
    owner: PickOwner
    placement: Placement | None = None  # of its request's adapter
    stay: Stay | None = None  # of its request in the engine's memory

    def __repr__(self) -> str:
        return f"<Pick {self.endpoint.id} {self.decision.reason}>"

    def begin(self, facts: OverlapFacts, speeds: SpeedModel | None, now: float) -> None:
        """Start the request at the engine after a wait that was not the engine's, with the facts as of now."""
        here = self.endpoint.id
        split = split_prompt(facts.prompt_tokens, facts.by_endpoint.get(here), here, speeds)
        self.endpoint.load.begin(self.reservation, split, now)

    def first_token(self, now: float) -> None:
        """Record the first body byte."""
        self.endpoint.waiting.pop(self, None)
        self.endpoint.load.first_token(self.reservation, now)
        if self.placement is not None:
            self.placement.first_token(now)
        if self.owner.queue is not None:
            self.owner.queue.on_load_decrease()
        if self.permit is not None and self.endpoint.breaker.state is BreakerState.HALF_OPEN:
            # a probe that streams for minutes must not keep the breaker half open that long
            self.permit.record_success()

    def on_unhealthy(self, give_back: Callable[[], None]) -> None:
        """Until the first byte or the end, `give_back` is called when the endpoint is found unhealthy, and after each
        further failed probe."""
        self.endpoint.waiting[self] = give_back

    def settle(self, outcome: AttemptOutcome, now: float) -> None:
        """End the attempt. Idempotent: the first outcome stands."""
        if self.reservation.released:
            return
        self._release(now, served=outcome is AttemptOutcome.SUCCESS)
        if outcome is AttemptOutcome.SUCCESS:  # the common case: no verdict changes
            self.endpoint.ended.add_request(self.reservation)
            if self.permit is not None:
                self.permit.record_success()
            health = self.endpoint.health
            if health.failures or health.unserved:
                health.record_success()
                self.owner.verdicts.follow_outage(now)
        else:
            if outcome in _UNSERVED:
                self.endpoint.health.record_unserved(now)
            self.blame(outcome, now)
        self.owner.on_release(self.endpoint, now)

    def suspend(self, now: float) -> None:
        """Release a failed attempt whose blame is decided later: `blame` must follow."""
        self._release(now, served=False)
        self.endpoint.health.record_unserved(now)
        self.owner.on_release(self.endpoint, now)

    def blame(self, outcome: AttemptOutcome, now: float) -> None:
        """Pass on the verdict about an attempt without success; about a suspended one FAILURE or UNPROVEN."""
        if self.permit is not None:
            if outcome is AttemptOutcome.CLIENT_ERROR:
                self.permit.record_success()
            elif outcome is AttemptOutcome.FAILURE:
                self.permit.record_failure()
            else:
                self.permit.record_cancellation()
        self.owner.verdicts.record_outcome(self.endpoint.engine, outcome, now)

    def observe_reuse(self, cached_tokens: int, now: float) -> None:
        """Pass the engine's report of cached prompt tokens on to the policies while the endpoint exists."""
        if not self.endpoint.metrics.closed:
            predicted = self.reservation.cached_tokens
            self.owner.policies.observe_reuse(self.endpoint.id, predicted, cached_tokens, now)

    def _release(self, now: float, *, served: bool) -> None:
        self.endpoint.waiting.pop(self, None)
        self.endpoint.load.release(self.reservation, now)
        if self.placement is not None:
            self.placement.end()
        if self.stay is not None:
            self.stay.end(now, served=served)


def reserve(endpoint: Ledgered, request: PickRequest, speeds: SpeedModel | None, now: float) -> Reservation:
    """Count the request in at its endpoint, with its known cached tokens there."""
    facts = request.facts
    hidden = not request.streams
    overlap = facts.by_endpoint.get(endpoint.id)
    uncached, cached, lower, onboarding_s = split_prompt(facts.prompt_tokens, overlap, endpoint.id, speeds)
    return endpoint.load.reserve(
        uncached,
        cached,
        now,
        onboarding_s=onboarding_s,
        lower=lower,
        hidden=hidden,
        known=facts.searched,
        blocks=facts.blocks,
    )


def split_prompt(tokens: int, overlap: Overlap | None, endpoint: EndpointId, speeds: SpeedModel | None) -> PromptSplit:
    """Split a prompt of `tokens` into its cached part at the endpoint and the rest."""
    if overlap is None:
        return PromptSplit(tokens, 0)
    cached = overlap.device_tokens
    lower = overlap.lower
    onboarding_s = 0.0
    if lower:
        lower = cut_lower(lower, tokens - cached)
        cached += count_lower(lower)
        onboarding_s = 0.0 if speeds is None else speeds.onboarding_s(endpoint, lower)
    cached = min(cached, tokens)
    return PromptSplit(tokens - cached, cached, lower, onboarding_s)


def expected_first_token_at(decision: Decision[Endpoint], speeds: SpeedModel | None, now: float) -> float | None:
    """When a request placed now would answer where it goes; None where that is not known, or will not be seen."""
    endpoint = decision.endpoint
    request = decision.request
    if speeds is None or not request.streams:
        return None
    slowness = speeds.slowness(endpoint.id, now)
    wait_s = endpoint.load.wait_s(speeds.seconds, slowness, now)
    return now + wait_s + slowness * own_s(request.facts, endpoint.id, speeds)
