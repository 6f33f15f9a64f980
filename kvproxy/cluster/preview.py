"""Where a cluster would send a request, asked without sending it: loads, breakers and counts stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Refusal
from kvproxy.cluster.screening import Screening
from kvproxy.routing.backlog import ReadOnlyLoad
from kvproxy.routing.policy import PickRequest
from kvproxy.types import EndpointId


@dataclass(frozen=True, slots=True)
class Preview:
    """As a pick would have it. `costs` by candidate, () from policies that know none."""

    endpoint: Endpoint
    policy: str
    reason: str
    candidates: Sequence[Endpoint]
    costs: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Seen:
    """An endpoint whose ledger no question changes."""

    id: EndpointId
    weight: float
    load: ReadOnlyLoad


def preview(cluster: Cluster, request: PickRequest, now: float) -> Preview | Refusal:
    """The policy itself is asked, so one that keeps count of its choices counts this one: round_robin moves on."""
    screening = Screening()
    screening.replace(cluster.endpoints)
    pool = screening.pool(request.model, now)
    candidates, named = pool.usable, cluster.deciders.named
    if not candidates:
        return cluster.refusal(request, now=now)
    decider = None if named is None else named.deciders.get(request.policy)
    policy, name = (cluster.policy, cluster.policy_name) if decider is None else (decider.policy, decider.name)
    preferred = next((each for each in candidates if each.id == request.preferred), None)
    if preferred is not None:
        return Preview(preferred, name, "preferred", candidates, ())
    choice = policy.choose(request, [_Seen(each.id, each.weight, ReadOnlyLoad(each.load)) for each in candidates], now)
    reason = "panic" if pool.panic else choice.reason
    return Preview(candidates[choice.index], name, reason, candidates, choice.costs)
