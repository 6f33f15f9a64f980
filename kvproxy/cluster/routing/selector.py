"""The routing decision, written once: proxy, `/pick`, replay, silent policies and receipts all ask `decide`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from kvproxy.cluster.routing.policy import Candidate, Choice, Ledgered, PickRequest, Policy
from kvproxy.cluster.routing.speeds import SpeedModel

CandidateT = TypeVar("CandidateT", bound=Candidate)

#: Reasons of decisions that are not a policy's, with their meaning.
PREFERRED = "preferred"
PANIC = "panic"
REASONS: Mapping[str, str] = {
    PREFERRED: "an earlier filter preferred it",
    PANIC: "no endpoint is healthy, so all of them are used",
}

#: Outcomes of a preferred endpoint; a label of the preferences metric.
FOLLOWED = "followed"


class Decision(msgspec.Struct, Generic[CandidateT], frozen=True):
    """Where a request is to go and why. Until its reservation the loads of `candidates` are those it was made by."""

    request: PickRequest
    candidates: Sequence[CandidateT]
    index: int
    endpoint: CandidateT  # the chosen one
    reason: str  # the policy's own, PREFERRED or PANIC; a metric label
    policy: str  # its name in the configuration
    decided_by: Policy
    choice: Choice | None = None  # the policy's; None if a preference was followed
    preference: str | None = None  # outcome of the preference; None without one
    speeds: SpeedModel | None = None  # speeds learned in this cluster, if any

    @property
    def costs(self) -> Sequence[float]:
        """Cost by candidate; () from policies without costs."""
        return () if self.choice is None else self.choice.costs


def decide(
    request: PickRequest,
    candidates: Sequence[CandidateT],
    policy: Policy,
    now: float,
    *,
    name: str = "",
    panic: bool = False,
    speeds: SpeedModel | None = None,
    why_skipped: Callable[[PickRequest, float], str] = lambda request, now: "unknown",
) -> Decision[CandidateT] | None:
    """One of the screened `candidates`: the preferred one if it is among them, otherwise the policy's choice.

    None where the request excludes all of them. `name` is that of the policy; `panic`: no candidate is well;
    `why_skipped` shows why a preferred endpoint is not among them. Changes nothing (see Policy.choose).
    """
    if request.excluded:
        # A list: a policy caches results for the pool's own tuple, which most requests come with.
        candidates = [candidate for candidate in candidates if candidate.id not in request.excluded]
    if not candidates:
        return None
    preference = None
    if request.preferred is not None:
        for index, candidate in enumerate(candidates):
            if candidate.id == request.preferred:
                reason = PANIC if panic else PREFERRED
                return Decision(request, candidates, index, candidate, reason, name, policy, None, FOLLOWED, speeds)
        preference = why_skipped(request, now)
    choice = policy.choose(request, candidates, now)
    reason = PANIC if panic else choice.reason
    index = choice.index
    return Decision(request, candidates, index, candidates[index], reason, name, policy, choice, preference, speeds)


def advance(endpoints: Iterable[Ledgered], speeds: SpeedModel, now: float) -> None:
    """Bring the ledgers up to `now`, before a request is placed on one of them: hidden requests that are due, by the
    speeds of the policies that decide, are taken as prefilled."""
    for endpoint in endpoints:
        load = endpoint.load
        if load.hidden_requests:
            load.advance(speeds.seconds, speeds.slowness(endpoint.id, now), now)
