"""What a routing policy sees and answers, and the base class of all. No I/O, no clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import ClassVar, Protocol

import msgspec

from kvproxy.base.settings.model import Model
from kvproxy.base.types import EndpointId, LowerTokens, count_lower
from kvproxy.cluster.routing.elsewhere import Others
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features


class FactSource(StrEnum):
    """Where an overlap fact came from; a metric label."""

    APPROXIMATE = "approximate"  # what we routed where
    PRECISE = "precise"  # KV events
    LMCACHE_CONTROLLER = "lmcache_controller"
    LMCACHE_COORDINATOR = "lmcache_coordinator"
    SESSION = "session"  # where its session, or the response it goes on from, was served last


class Overlap(msgspec.Struct, frozen=True):
    """Leading tokens of one prompt that one endpoint already holds."""

    device_tokens: int  # in engine memory, contiguous from the start
    lower: LowerTokens = ()  # further contiguous tokens, which have to be brought up first
    source: FactSource = FactSource.APPROXIMATE
    age_s: float = 0.0
    claimed_tokens: int = 0  # what KV events said; it may be more than counts, or less (trust, requests under way)
    backed_tokens: int = 0  # of those, what was routed there says as well
    held_tokens: int = 0  # what it holds, where it reuses no more than the whole steps of that; 0: it reuses all

    @property
    def lower_tokens(self) -> int:
        """Of all lower tiers."""
        return count_lower(self.lower)

    @property
    def tokens(self) -> int:
        """Contiguous tokens over all tiers."""
        return self.device_tokens + count_lower(self.lower) if self.lower else self.device_tokens


class OverlapFacts(msgspec.Struct, frozen=True):
    """Everything known about one prompt before the pick. Endpoints without an entry hold nothing we know of."""

    prompt_tokens: int  # exact or estimated
    by_endpoint: Mapping[EndpointId, Overlap] = msgspec.field(default_factory=dict)
    hot_tokens: int = 0  # leading tokens whose blocks are hot (worth replicating)
    blocks: Sequence[int] = ()  # chained hashes of the prompt's blocks; not to be changed
    block_tokens: float = 0.0  # of each of these blocks, about

    def matched_tokens(self, endpoint: EndpointId) -> int:
        """Leading tokens `endpoint` holds, never more than the prompt has."""
        overlap = self.by_endpoint.get(endpoint)
        return 0 if overlap is None else min(overlap.tokens, self.prompt_tokens)


NO_FACTS = OverlapFacts(prompt_tokens=0)


class PickRequest(msgspec.Struct, frozen=True):
    """What a policy may base its choice on."""

    model: str = ""
    session_key: str | None = None  # of its session, or of the one that this was made from
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
    #: Seconds that the adapter it asks for adds, by endpoint; None: it asks for none.
    adapter_s: Mapping[EndpointId, float] | None = None
    #: Seconds that it costs to copy KV to an endpoint for it; None: nothing is copied.
    transfer_s: Mapping[EndpointId, float] | None = None


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
    def live_blocks(self) -> int | None: ...
    def leading_live_blocks(self, blocks: Sequence[int]) -> int: ...
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
    """The decision: an index into the candidates, why, and what each candidate would have cost (policies that know).

    A policy whose `placed` goes on from what `choose` worked out returns a subclass with that."""

    index: int
    reason: str  # one of the policy's `reasons`; a metric label
    costs: Sequence[float] = ()


class Policy(ABC):
    """Chooses one of at least one candidate; a new one is a file with a subclass and a line in `registry.py`.

    `choose` changes nothing, so that anything may ask what it would choose; only its draws of chance move on. What a
    policy counts or learns it hears of in the other methods: samples teach its `speeds`, if it has any; the others do
    nothing unless a subclass overrides them.
    """

    #: Whether it weighs what endpoints hold against load. Where no policy does, no facts are gathered, and a preference
    #: for the endpoint that holds most overrules nothing.
    uses_overlap: ClassVar[bool] = False
    #: Whether it has `speeds`, which the router queue needs: it knows how long a prefill takes.
    learns_speeds: ClassVar[bool] = False
    #: Whether it asks loads for live blocks, which are counted only where some policy does.
    counts_live_blocks: ClassVar[bool] = False
    #: What each of its reasons means, for people.
    reasons: ClassVar[Mapping[str, str]] = {}

    #: Learned speeds of the pool; None exactly where `learns_speeds` is false.
    speeds: SpeedModel | None = None
    #: Parameters, read again by every choice, so that they may be replaced as a whole; None: it has none.
    settings: Model | None = None
    #: Told the endpoint, the prefill seconds, and whether elsewhere would have cost much more, of what was placed.
    on_placed: Callable[[EndpointId, float, bool], None] | None = None
    others: Others | None = None  # None: no other router is heard

    def __init__(self, *, rng: Random, settings: Model | None = None) -> None:
        """`settings` are of the type that the configuration gives the policy of this name."""
        self._rng = rng
        if settings is not None:
            self.settings = settings

    @abstractmethod
    def choose(self, request: PickRequest, candidates: Sequence[Candidate], now: float) -> Choice:
        """One of `candidates`."""

    def placed(
        self, request: PickRequest, candidates: Sequence[Candidate], index: int, now: float, *, choice: Choice | None
    ) -> None:
        """A request goes to `candidates[index]`. `choice`: this policy's own; None where something else decided."""

    def placed_elsewhere(
        self, endpoint: EndpointId, routed_s: float, requests: int, bound: int, endpoints: int, now: float
    ) -> None:
        """Another proxy placed requests there, one of so many endpoints: `routed_s` seconds of prefill, and `bound` of
        them would have cost much more elsewhere."""

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
        """A response reported `cached_tokens` where `predicted_tokens` had been expected."""

    def observe_answer(
        self, endpoint: EndpointId, output_tokens: int, decode_s: float, sequences: float, now: float
    ) -> None:
        """A streamed answer of so many tokens took `decode_s` from its first token to its end, beside so many sequences
        in flight on average, itself among them."""

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left the cluster for good."""

    def estimates(self, now: float) -> Mapping[str, object]:
        """Return what it has learned: plain values by name, units in the names; empty where it learns nothing."""
        return {}
