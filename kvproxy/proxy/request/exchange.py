"""What the filters of one request tell each other, one object beside the ASGI scope; what became of it; and its ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from kvproxy.base.json_scan import Members
from kvproxy.base.types import EndpointId, InferenceRequest
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import OverlapFacts, PickRequest

SCOPE_KEY = "kvproxy"

#: nginx's word for it; never on the wire, only in logs and metrics.
CLIENT_CLOSED_REQUEST = 499

#: Candidates of one decision that are remembered with their costs; of larger fleets receipts hold the cheapest.
MAX_REMEMBERED = 32

#: Ends of requests that were not answered as their client wished, whatever the status said; "": no filter answered.
_FAILED_ENDS = frozenset({"engine_error", "upstream_died", "aborted", ""})
FAILED = "failed"
#: What may become of a request; a metric label.
RESULTS = ("ok", FAILED, "client_error", "client_left")

#: Causes of failures beside those of local replies: an engine's own error, and an answer without its end.
ENGINE_5XX = "engine_5xx"
BROKEN_OFF = "broken_off"
#: The local reply for a request that the router queue has no place for.
QUEUE_FULL = "queue_full"

#: Of random bytes at a time: a system call for each id would cost more than the rest of it.
_DRAWN_BYTES = 2048


def result_of(end: str, status: int) -> str:
    """Return what became of a request, one of RESULTS: for the live page, `kvproxy status`, the access log and the
    metric that alerts ask. Failed is an answer of 500 or more and one that broke off. A client's own mistake (4xx) is
    no failure, and a client that left before the end is none.
    """
    if status >= 500 or end in _FAILED_ENDS:
        return FAILED
    if end == "client_disconnected":
        return "client_left"
    return "client_error" if status >= 400 else "ok"


class HasHooks(Protocol):
    """An observer (`kvproxy.proxy.request.observer.RequestObserver`), as far as the exchange knows it."""

    @property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks it wants to be called."""
        ...


#: Of a transfer that is not over.
UNDER_WAY = "under_way"


class TransferResult(msgspec.Struct, omit_defaults=True):
    """KV was to be copied to an endpoint for the request, before it went there."""

    endpoint: EndpointId
    source: str  # an endpoint, or `shared`
    tokens: int  # that were to be there then
    #: done, late (the request went first), left (its client did, or its endpoint became unhealthy), no_effect, timeout,
    #: ... as actions have it
    result: str = UNDER_WAY
    moved: int = 0
    waited_s: float = 0.0  # by the request for the copy alone


class Copier(Protocol):
    """What copies KV to where a request goes, and lets the request wait for that; None of its methods raises."""

    def offer(self, asked: PickRequest, now: float) -> PickRequest:
        """Return what is to be decided, with what could be copied."""
        ...

    async def wait(self, exchange: Exchange) -> bool:
        """For the copy that the request was placed with, within a bound. True: its place is to be counted by the facts
        that the exchange has now, and from now on."""
        ...


class Outcome(msgspec.Struct, eq=False):
    """What really happened to a forwarded request; filled in by the router filter. (A struct, as the exchange: one is
    made in C.)"""

    endpoint: EndpointId | None = None  # that served (or failed last)
    cluster: str = ""
    policy: str = ""
    pick_reason: str = ""  # why that endpoint: the policy's reason, "preferred", or why the preference was passed over
    status: int = 0  # sent downstream
    attempts: int = 0
    end: str = ""  # completed, engine_error, upstream_died, client_disconnected, local_reply
    ttft_s: float | None = None  # from receipt to the first body byte from upstream
    prompt_tokens: int | None = None  # the engine's own usage, when it said so
    cached_tokens: int | None = None
    media_tokens: int | None = None  # of the prompt's: pictures, audio and video
    completion_tokens: int | None = None
    predicted_tokens: int | None = None  # cached, as the client was told since the engine did not say
    response_id: str = ""  # by which another request may go on from this one
    candidates: Sequence[Endpoint] = ()  # of the last pick, and what each would have cost by the policy; () if there
    costs: Sequence[float] = ()  # were more than MAX_REMEMBERED
    engine_priority: int | None = None  # the number its engine was told to order it by
    cache_loss: str = ""  # how the endpoint that answered had lost its cache shortly before
    transfer: TransferResult | None = None  # of KV, before it went there
    local_reason: str = ""  # of a local reply: the `code` of its error, from a closed set
    notes: dict[str, msgspec.Struct] = {}  # of features, each a field of its receipt

    @property
    def prefilled(self) -> bool:
        """Whether the engine computed the prompt: a first byte of a good answer came, whatever came after it."""
        return self.ttft_s is not None and 200 <= self.status < 300 and self.end != "engine_error"

    def failure_cause(self) -> str:
        """Why the request was not served, from a closed set; "" if it was, or if that was the client's doing."""
        if self.local_reason == QUEUE_FULL:
            return QUEUE_FULL
        if result_of(self.end, self.status) != FAILED:
            return ""
        if self.local_reason:
            return self.local_reason
        return BROKEN_OFF if self.end in _FAILED_ENDS else ENGINE_5XX

    def client_left(self) -> None:
        """The client closed its connection before the response was complete."""
        self.end = "client_disconnected"
        self.status = self.status or CLIENT_CLOSED_REQUEST


class TopNames(NamedTuple):
    """Members of a body as one strict parse reads them."""

    body: bytes
    beside: bytes  # the text that was parsed: the body, or a long one without its messages
    names: Mapping[str, msgspec.Raw] | None  # None: unreadable at once


class Exchange(msgspec.Struct, eq=False, kw_only=True):
    """State of one request on its way through the chain."""

    received_at: float
    request_id: str = ""
    names_itself: bool = False  # a `request_id` in its body replaces the one that was made here
    tenant: str = ""  # name of the API key that authenticated; "" when none
    trusted: bool = False  # its key says that it speaks for engines, not for users
    may_debug: bool = True  # with `auth`: only if its key says so
    isolated: bool = False  # what it has cached is for its tenant alone
    tells_priority: bool = False  # its cluster tells engines in which order to admit: a client's own word is cut
    own_priority: int | None = None  # what a trusted client said instead, in its body
    body: bytes | None = None  # the whole body once inference_request read it
    held_bytes: int = 0  # of it, that are counted among those of all requests
    received_bytes: int = 0  # of the body, from the client
    inference: InferenceRequest | None = None
    members: Members | None = None  # of a scanned body: those that are read, guarded, salted or examined
    names: TopNames | None = None  # of a body that was not
    #: That the client asked for and gets; "": the cluster's own. It decides alone, preference or not.
    policy: str = ""
    preferred: EndpointId | None = None
    barred: frozenset[EndpointId] = frozenset()  # endpoints that it must not go to
    upstream_id: str = ""  # the id that engines get in place of `request_id`; "": the same
    facts: OverlapFacts | None = None
    #: Brings facts and preference up to date from what is known here; must not raise, block or wait.
    facts_source: Callable[[Exchange], None] | None = None
    copier: Copier | None = None  # None: the request waits for no copy
    debug: bool = False  # the client asked for x-kvproxy-decision
    trace_id: str = ""  # W3C, 32 hex digits; "" without `tracing`
    trace_parent: bytes = b""  # W3C `traceparent` of the present attempt; b"": the one in the headers
    followed: bool = False  # a Downstream notifies the observers of its response already
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    #: What hears of this request's stages, in this order (`attach`), and the hooks that some of it has.
    observers: tuple[HasHooks, ...] = ()
    hooks: frozenset[str] = frozenset()

    def attach(self, *observers: HasHooks) -> None:
        """These hear of the request from now on, after those that are there."""
        self.observers += observers
        for observer in observers:
            self.hooks |= observer.hooks

    @classmethod
    def of(cls, scope: MutableMapping[str, Any], *, now: float) -> Exchange:
        """Return the exchange of this scope, made on first use."""
        exchange = scope.get(SCOPE_KEY)
        if exchange is None:
            exchange = scope[SCOPE_KEY] = cls(received_at=now)
        assert isinstance(exchange, cls)
        return exchange


class RandomHex:
    """A stock of unguessable hexadecimal digits, drawn from the system many at a time; none is handed out twice."""

    __slots__ = ("_at", "_draw", "_stock")

    def __init__(self, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._draw = draw
        self._stock = ""
        self._at = 0

    def take(self, digits: int) -> str:
        """Return the next `digits` (at most 4096)."""
        at = self._at
        end = self._at + digits
        if end > len(self._stock):
            self._stock = self._draw(_DRAWN_BYTES).hex()
            at = 0
            end = digits
        self._at = end
        return self._stock[at:end]
