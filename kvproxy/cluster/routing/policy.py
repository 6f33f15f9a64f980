"""Inputs and results of a routing policy, and the base class of all. No I/O, no clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import ClassVar, NewType, Protocol

import msgspec

from kvproxy.base.types import EndpointId, LowerTokens, count_lower
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.remote_load import ReplicaSpread
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features

#: Where an overlap fact came from; a metric label. Features have more.
FactSource = NewType("FactSource", str)
APPROXIMATE = FactSource("approximate")  # routed requests
PRECISE = FactSource("precise")  # KV events
SESSION = FactSource("session")  # endpoint of the session's last turn, or of the response that this one continues


class Overlap(msgspec.Struct, frozen=True):
    """Leading tokens of one prompt that one endpoint already holds."""

    device_tokens: int  # in engine memory, contiguous from the start
    lower: LowerTokens = ()  # further contiguous tokens, which have to be loaded first
    source: FactSource = APPROXIMATE
    age_s: float = 0.0
    claimed_tokens: int = 0  # as reported by KV events; more or less than counts (trust, requests in flight)
    backed_tokens: int = 0  # of those, tokens that routed requests confirm
    held_tokens: int = 0  # tokens held where the engine reuses only whole steps of them; 0: it reuses all

    @property
    def lower_tokens(self) -> int:
        """Of all lower tiers."""
        return count_lower(self.lower)

    @property
    def tokens(self) -> int:
        """Contiguous tokens over all tiers."""
        return self.device_tokens + count_lower(self.lower) if self.lower else self.device_tokens


class OverlapFacts(msgspec.Struct, frozen=True):
    """Facts about one prompt before the pick. Endpoints without an entry have no known cached tokens."""

    prompt_tokens: int  # exact or estimated
    by_endpoint: Mapping[EndpointId, Overlap] = msgspec.field(default_factory=dict)
    hot_tokens: int = 0  # leading tokens whose blocks are hot (worth replicating)
    blocks: Sequence[int] = ()  # chained hashes of the prompt's blocks; not to be changed
    block_tokens: float = 0.0  # mean tokens of these blocks
    searched: bool = True  # False: the length alone is known, not what endpoints hold
    session: int = 0  # hashed name of its session, if its client gave one
    parent: int = 0  # likewise of the session that this one was made from

    def matched_tokens(self, endpoint: EndpointId) -> int:
        """Leading tokens `endpoint` holds, never more than the prompt has."""
        overlap = self.by_endpoint.get(endpoint)
        return 0 if overlap is None else min(overlap.tokens, self.prompt_tokens)


NO_FACTS = OverlapFacts(prompt_tokens=0, searched=False)


class PickRequest(msgspec.Struct, frozen=True):
    """Inputs of a policy's choice."""

    model: str = ""
    session_key: str | None = None  # of its session or its parent session
    facts: OverlapFacts = NO_FACTS
    #: Soft preference of an earlier filter; honoured by the cluster before the policy is asked.
    preferred: EndpointId | None = None
    #: Endpoints already tried for this request; screened out by the cluster.
    excluded: frozenset[EndpointId] = frozenset()
    #: Whether its first token can be seen separately from the end of its answer.
    streams: bool = True
    #: Stable bytes of the prompt's head, for hashing policies; b"" when unknown.
    prompt_head: bytes = b""
    #: Policy requested by the client, if the cluster permits it; "": the cluster's own.
    policy: str = ""
    #: Seconds that the requested adapter adds, by endpoint; None: no adapter.
    adapter_s: Mapping[EndpointId, float] | None = None
    #: Seconds to copy KV to an endpoint for it; None: no copy.
    transfer_s: Mapping[EndpointId, float] | None = None
    #: No endpoint has room for its session; it waits in the router queue.
    waits_for_room: bool = False
    #: Length of its answer as a trusted client expects it; 0: not stated.
    output_tokens: int = 0


class LiveBlocksView(Protocol):
    """Distinct prompt blocks of what is in flight."""

    def __len__(self) -> int: ...
    def count_leading(self, hashes: Sequence[int]) -> int: ...


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
    @property
    def live(self) -> LiveBlocksView | None: ...
    def wait_s(self, seconds: Features, slowness: float, now: float) -> float: ...


class Candidate(Protocol):
    """An endpoint that passed screening."""

    @property
    def id(self) -> EndpointId: ...
    @property
    def weight(self) -> float: ...
    @property
    def load(self) -> LoadView: ...


class Ledgered(Protocol):
    """An endpoint with the ledger itself, not a view of it."""

    @property
    def id(self) -> EndpointId: ...
    @property
    def load(self) -> EndpointLoad: ...


class Choice(msgspec.Struct, frozen=True):
    """Decision of a policy: an index into the candidates, the reason, and the cost of each candidate where the policy
    estimates costs.

    A policy whose `placed` needs results of `choose` returns a subclass with them."""

    index: int
    reason: str  # one of the policy's `reasons`; a metric label
    costs: Sequence[float] = ()


class Policy(ABC):
    """Base class of policies, which choose one of at least one candidate; a new one is a file with a subclass and a
    line in `registry.py`.

    `choose` changes nothing, so that anything may ask what it would choose; only its draws of chance move on. A policy
    counts and learns in its other methods: samples update its `speeds`, if it has any; the rest does nothing unless a
    subclass overrides it."""

    #: Whether it weighs overlap against load. If no policy does, no facts are gathered, and a preference for the
    #: endpoint with most overlap overrules nothing.
    uses_overlap: ClassVar[bool] = False
    #: Whether it has `speeds`, which the router queue needs to estimate prefill times.
    learns_speeds: ClassVar[bool] = False
    #: Whether it needs live blocks, which are counted only then.
    counts_live_blocks: ClassVar[bool] = False
    #: Meaning of each of its reasons, for people.
    reasons: ClassVar[Mapping[str, str]] = {}

    #: Learned speeds of the pool; None exactly if `learns_speeds` is false.
    speeds: SpeedModel | None = None
    #: Called for each placement with the endpoint, the prefill seconds, and whether elsewhere would have cost much
    #: more.
    on_placed: Callable[[EndpointId, float, bool], None] | None = None
    others: ReplicaSpread | None = None  # None: no other router reports its load

    def __init__(self, *, rng: Random) -> None:
        self._rng = rng

    @abstractmethod
    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """One of `candidates`."""

    def placed(
        self, request: PickRequest, candidates: Sequence[Candidate], index: int, now: float, *, choice: Choice | None
    ) -> None:
        """Record a request placed at `candidates[index]`. `choice`: this policy's own; None if something else
        decided."""

    def placed_elsewhere(
        self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, endpoints: int, now: float
    ) -> None:
        """Record requests placed by another proxy at one of `endpoints` endpoints: `routed_s` seconds of prefill, and
        `bound` of them would have cost much more elsewhere."""

    def observe_sample(
        self,
        endpoint: EndpointId,
        work: Features,
        busy_s: float,
        now: float,
        *,
        lower: LowerTokens = (),
        scraped: bool = False,
    ) -> None:
        """`endpoint` did `work` in `busy_s` seconds and brought `lower` up for it: a sample closed by its load ledger,
        or `scraped` from the engine's own counters."""
        if self.speeds is not None:
            self.speeds.observe(endpoint, work, busy_s, now, lower=lower, scraped=scraped)

    def observe_reuse(self, endpoint: EndpointId, predicted_tokens: int, cached_tokens: int, now: float) -> None:
        """Record a response that reported `cached_tokens` where `predicted_tokens` had been expected."""

    def forget(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left the cluster for good."""

    def estimates(self, now: float) -> Mapping[str, object]:
        """Return its learned estimates: plain values by name, units in the names; empty where it learns nothing."""
        return {}
