"""What a balancing policy sees and what it answers. Policies are pure: no I/O and no clock of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from kvproxy.routing.load import Features
from kvproxy.types import EndpointId

if TYPE_CHECKING:
    from kvproxy.cluster.decision import Witness


class FactSource(StrEnum):
    """Where an overlap fact came from; a metric label."""

    APPROXIMATE = "approximate"  # what we routed where
    PRECISE = "precise"  # KV events
    LMCACHE_CONTROLLER = "lmcache_controller"
    LMCACHE_COORDINATOR = "lmcache_coordinator"


class Overlap(msgspec.Struct, frozen=True):
    """Leading tokens of one prompt that one endpoint already holds."""

    device_tokens: int  # in engine memory, contiguous from the start
    lower_tokens: int = 0  # further contiguous tokens on host or disk tiers
    source: FactSource = FactSource.APPROXIMATE
    age_s: float = 0.0
    claimed_tokens: int = 0  # what KV events said; more than is counted where earlier claims proved wrong (trust.py)
    backed_tokens: int = 0  # of those, what was routed there says as well

    @property
    def tokens(self) -> int:
        """Contiguous tokens over all tiers."""
        return self.device_tokens + self.lower_tokens


class OverlapFacts(msgspec.Struct, frozen=True):
    """Everything known about one prompt before the pick. Endpoints without an entry hold nothing we know of."""

    prompt_tokens: int  # exact or estimated
    by_endpoint: Mapping[EndpointId, Overlap] = msgspec.field(default_factory=dict)
    hot_tokens: int = 0  # leading tokens whose blocks are hot (worth replicating)

    def matched_tokens(self, endpoint: EndpointId) -> int:
        """Leading tokens `endpoint` holds, never more than the prompt has."""
        overlap = self.by_endpoint.get(endpoint)
        return 0 if overlap is None else min(overlap.tokens, self.prompt_tokens)


NO_FACTS = OverlapFacts(prompt_tokens=0)


class PickRequest(msgspec.Struct, frozen=True):
    """What a policy may base its choice on."""

    model: str = ""
    session_key: str | None = None
    facts: OverlapFacts = NO_FACTS
    #: Soft preference of an earlier filter; honoured by the cluster before the policy is asked.
    preferred: EndpointId | None = None
    #: Endpoints already tried for this request; screened out by the cluster.
    excluded: frozenset[EndpointId] = frozenset()
    #: Whether its first token will be seen on its own, apart from the end of its answer.
    streams: bool = True
    #: Stable bytes of the prompt's head, for hashing policies; b"" when unknown.
    prompt_head: bytes = b""
    #: Policy the client asked for, where the cluster lets it; "": the cluster's own.
    policy: str = ""
    #: Told by the cluster what it decides; nothing for a policy.
    witness: Witness | None = None


class LoadView(Protocol):
    """How busy an endpoint is, as far as a policy may ask."""

    @property
    def in_flight(self) -> int: ...
    @property
    def pending_requests(self) -> int: ...
    @property
    def pending_tokens(self) -> int: ...
    @property
    def resident_tokens(self) -> int: ...
    def wait_s(self, seconds: Features, slowness: float, now: float) -> float: ...


class Candidate(Protocol):
    """An endpoint that passed screening."""

    @property
    def id(self) -> EndpointId: ...
    @property
    def weight(self) -> float: ...
    @property
    def load(self) -> LoadView: ...


class Choice(msgspec.Struct, frozen=True):
    """The decision: an index into the candidates, why, and what each candidate would have cost (policies that know)."""

    index: int
    reason: str  # closed set per policy; a metric label
    costs: Sequence[float] = ()


class Policy(Protocol):
    """Chooses one of at least one candidate. Called once per placement, so a policy may count what it decided."""

    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice: ...


@runtime_checkable
class Onlooker(Protocol):
    """A policy that counts what is placed in its pool, also by other policies that decide there."""

    def placed(self, request: PickRequest, endpoint: EndpointId, endpoints: int, now: float) -> None:
        """The request went to `endpoint`, one of `endpoints`."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A policy that learns from what its choices led to.

    Whoever owns the endpoints connects it: `load.on_sample` of every endpoint that policy chooses among calls
    `observe_sample` with the endpoint's id, `observe_reuse` follows each response that tells how many prompt tokens
    came from the cache, and `forget` an endpoint that left for good.
    """

    def observe_sample(
        self, endpoint: EndpointId, work: Features, busy_s: float, now: float, *, scraped: bool = False
    ) -> None:
        """`endpoint` did `work` in `busy_s` seconds: a sample closed by its load ledger, or `scraped` from the engine's
        own counters."""
        ...

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        """A response reported `cached_tokens` where `predicted_tokens` had been expected."""
        ...

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left the cluster."""
        ...
