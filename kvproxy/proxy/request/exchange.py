"""State that the filters of one request share, beside the ASGI scope; its outcome; and its ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from kvproxy.base.json_scan import Members
from kvproxy.base.types import EndpointId, InferenceRequest, RequestHints
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.feature import RequestAddition
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.proxy.request.continuation import Continuation
from kvproxy.proxy.request.repeats import Repeats

SCOPE_KEY = "kvproxy"

#: nginx's code; never on the wire, only in logs and metrics.
CLIENT_CLOSED_REQUEST = 499

#: Candidates of one decision that are kept with their costs; of larger fleets receipts hold the cheapest.
MAX_REMEMBERED = 32

#: Ends of requests that failed their client, whatever the status; "": no filter answered.
_FAILED_ENDS = frozenset({"engine_error", "upstream_died", "aborted", ""})
FAILED = "failed"
#: Results of a request; a metric label.
RESULTS = ("ok", FAILED, "client_error", "client_left")

#: Causes of failures beside those of local replies: an engine's own error, and an answer without its end.
ENGINE_5XX = "engine_5xx"
BROKEN_OFF = "broken_off"
#: Reason of the local reply if the router queue is full.
QUEUE_FULL = "queue_full"

#: Random bytes drawn at a time: a system call for each id would cost more than the rest of it.
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
    """Observer (`kvproxy.proxy.request.observer.RequestObserver`), as the exchange uses it."""

    @property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks it wants to be called."""
        ...


class Outcome(msgspec.Struct, eq=False):
    """Outcome of a forwarded request; filled in by the router filter. (A struct, as the exchange: one is made in C.)"""

    endpoint: EndpointId | None = None  # that served, or failed last
    cluster: str = ""
    policy: str = ""
    pick_reason: str = ""  # why that endpoint: the policy's reason, "preferred", or why the preference was passed over
    status: int = 0  # sent downstream
    attempts: int = 0
    end: str = ""  # completed, engine_error, upstream_died, client_disconnected, local_reply
    ttft_s: float | None = None  # from receipt to the first body byte from upstream
    prompt_tokens: int | None = None  # the engine's own usage, if reported
    cached_tokens: int | None = None
    media_tokens: int | None = None  # of the prompt's: pictures, audio and video
    completion_tokens: int | None = None
    predicted_tokens: int | None = None  # cached tokens in the answer to the client, since the engine reported none
    calls_tool: bool = True  # the answer does, or that is not known
    response_id: str = ""  # by which another request may continue this one
    candidates: Sequence[Endpoint] = ()  # of the last pick, and the policy's cost of each; () if there
    costs: Sequence[float] = ()  # were more than MAX_REMEMBERED
    cache_loss: str = ""  # how the endpoint that answered had lost its cache shortly before
    local_reason: str = ""  # of a local reply: the `code` of its error, from a closed set
    prefill_endpoint: EndpointId | None = None  # that computed the prompt, if another one did; cached tokens are its
    notes: dict[str, object] = {}  # of features, each a field of its receipt

    @property
    def prefilled(self) -> bool:
        """True if the engine computed the prompt: the first byte of a good answer came, even if it broke later."""
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
        """Record that the client closed its connection before the response was complete."""
        self.end = "client_disconnected"
        self.status = self.status or CLIENT_CLOSED_REQUEST


class TopNames(NamedTuple):
    """Members of a body as one strict parse reads them."""

    body: bytes
    beside: bytes  # the parsed text: the body, or a long one without its messages, or those that came before
    names: Mapping[str, msgspec.Raw] | None  # None: not readable at once


class Exchange(msgspec.Struct, eq=False, kw_only=True):
    """State of one request on its way through the chain."""

    received_at: float
    request_id: str = ""
    names_itself: bool = False  # a `request_id` in its body replaces the one made here
    tenant: str = ""  # name of the API key that authenticated; "" when none
    weight: float = 1.0  # share of its tenant in the router queue
    trusted: bool = False  # its key is for engines, not for users
    may_debug: bool = True  # with `auth`: only if its key permits it
    isolated: bool = False  # its cached tokens are for its tenant alone
    addition: RequestAddition | None = None  # a number for its engine, in place of a client's own member
    own_number: int | None = None  # what a trusted client put into that member
    body: bytes | None = None  # the whole body once inference_request read it
    held_bytes: int = 0  # bytes of it counted in the total of all requests
    release: Callable[[int], None] | None = None  # gives these back, when the filters are through
    received_bytes: int = 0  # of the body, from the client
    inference: InferenceRequest | None = None
    members: Members | None = None  # of a scanned body: members that are read, guarded, salted or examined
    names: TopNames | None = None  # of an unscanned body
    repeats: Repeats | None = None  # messages of a longer one that came before
    #: Requested by the client and permitted; "": the cluster's own. It decides alone, without preferences.
    policy: str = ""
    preferred: EndpointId | None = None
    barred: frozenset[EndpointId] = frozenset()  # endpoints that it must not go to
    upstream_id: str = ""  # id for engines in place of `request_id`; "": the same
    facts: OverlapFacts | None = None
    #: Refreshes facts and preference from local state; must not raise, block or wait.
    facts_source: Callable[[Exchange], None] | None = None
    #: Called with an endpoint that computes the prompt for the one of the placement, and with the latter once it has
    #: pulled the prompt, or computes it after all; True: the one before has computed it. Must not raise, block or wait.
    on_prompt_at: Callable[[EndpointId, bool], None] | None = None
    debug: bool = False  # the client requested x-kvproxy-decision
    trace_id: str = ""  # W3C, 32 hex digits; "" if nothing traces
    trace_parent: bytes = b""  # W3C `traceparent` of the present attempt; b"": the one in the headers
    breaks_off: bool = False  # a broken stream ends without an error event, as its client has a way to raise it
    continuation: Continuation | None = None  # None: a stream that breaks is not resumed
    followed: bool = False  # a Downstream already notifies the observers of its response
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    #: Observers of this request's stages, in this order (`attach`), and the union of their hooks.
    observers: tuple[HasHooks, ...] = ()
    hooks: frozenset[str] = frozenset()

    @property
    def hints(self) -> RequestHints | None:
        """Return what a trusted client expects of the request."""
        return self.inference.hints if self.trusted and self.inference is not None else None

    def attach(self, *observers: HasHooks) -> None:
        """Add observers of the request behind those that are there."""
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
