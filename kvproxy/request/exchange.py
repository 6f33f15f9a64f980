"""What the filters of one request tell each other: one object beside the ASGI scope."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvproxy.json_scan import Members
from kvproxy.routing.policy import OverlapFacts
from kvproxy.types import EndpointId, InferenceRequest

if TYPE_CHECKING:
    from kvproxy.cluster.decision import Witness
    from kvproxy.cluster.endpoint import Endpoint
    from kvproxy.cluster.pick import Pick

SCOPE_KEY = "kvproxy"

#: Candidates of one decision that are remembered with their costs; of larger fleets receipts hold the cheapest.
MAX_REMEMBERED = 32

#: Ends of requests that were not answered as their client wished, whatever the status said; "": no filter answered.
_FAILED_ENDS = frozenset({"engine_error", "upstream_died", "aborted", ""})
FAILED = "failed"
#: What may become of a request; a metric label.
RESULTS = ("ok", FAILED, "client_error", "client_left")


def result_of(end: str, status: int) -> str:
    """What became of a request, one of RESULTS: for the live page, `kvproxy status`, the access log and the metric
    that alerts ask. Failed is an answer of 500 or more and one that broke off. A client's own mistake (4xx) is no
    failure, and a client that left before the end is none.
    """
    if status >= 500 or end in _FAILED_ENDS:
        return FAILED
    if end == "client_disconnected":
        return "client_left"
    return "client_error" if status >= 400 else "ok"


class Trace(Protocol):
    """Told when one request enters and leaves its stages; must not raise or block."""

    def facts_began(self) -> None: ...
    def facts_known(self) -> None: ...
    def routing_began(self) -> None: ...
    def attempt_began(self, pick: Pick) -> bytes:
        """The W3C `traceparent` this attempt carries upstream."""
        ...

    def attempt_failed(self, reason: str) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What really happened to a forwarded request; filled in by the router filter."""

    endpoint: EndpointId | None = None  # who served (or failed last)
    cluster: str = ""
    policy: str = ""
    pick_reason: str = ""  # why that endpoint: the policy's reason, "preferred", or why the preference was passed over
    status: int = 0  # sent downstream
    attempts: int = 0
    end: str = ""  # completed, engine_error, upstream_died, client_disconnected, local_reply
    ttft_s: float | None = None  # from receipt to the first body byte from upstream
    prompt_tokens: int | None = None  # the engine's own usage, when it said so
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    candidates: Sequence[Endpoint] = ()  # of the last pick, and what each would have cost by the policy; () if there
    costs: Sequence[float] = ()  # were more than MAX_REMEMBERED


class Exchange:
    """State of one request on its way through the chain."""

    __slots__ = (
        "body",
        "debug",
        "facts",
        "inference",
        "isolated",
        "may_debug",
        "members",
        "on_complete",
        "on_pick",
        "outcome",
        "policy",
        "preferred",
        "received_at",
        "refresh",
        "request_id",
        "tenant",
        "trace",
        "trace_id",
        "trusted",
        "witness",
    )

    def __init__(self, *, received_at: float) -> None:
        self.received_at = received_at
        self.request_id = ""
        self.tenant = ""  # name of the API key that authenticated; "" when none
        self.trusted = False  # its key says that it speaks for engines, not for users
        self.may_debug = True  # with `auth`: only if its key says so
        self.isolated = False  # what it has cached is for its tenant alone
        self.body: bytes | None = None  # the whole body once inference_request read it
        self.inference: InferenceRequest | None = None
        self.members: Members | None = None  # of a scanned body: those that are read, guarded or salted
        self.policy = (
            ""  # that the client asked for and gets; "": the cluster's own. It decides alone, preference or not
        )
        self.preferred: EndpointId | None = None
        self.facts: OverlapFacts | None = None
        #: Brings facts and preference up to date from what is known here; must not raise, block or wait.
        self.refresh: Callable[[Exchange], None] | None = None
        self.debug = False  # the client asked for x-kvproxy-decision
        self.trace: Trace | None = None  # only for requests that `tracing` follows
        self.trace_id = ""  # W3C, 32 hex digits; "" without `tracing`
        self.witness: Witness | None = None  # hears of this request's placements
        self.outcome = Outcome()
        #: Called by the router after every pick (a retry picks again), with the outcome's endpoint set; as below.
        self.on_pick: list[Callable[[Exchange], None]] = []
        #: Called once each by the router when the request is over, whatever the end; must not raise or block.
        self.on_complete: list[Callable[[Exchange], None]] = []

    @classmethod
    def of(cls, scope: MutableMapping[str, Any], *, now: float) -> Exchange:
        """The exchange of this scope, made on first use."""
        exchange = scope.get(SCOPE_KEY)
        if exchange is None:
            exchange = scope[SCOPE_KEY] = cls(received_at=now)
        assert isinstance(exchange, cls)
        return exchange
