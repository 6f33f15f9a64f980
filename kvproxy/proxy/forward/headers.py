"""Header lists on their way through: what goes upstream, what comes back. Built fresh for every attempt."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from operator import itemgetter

import msgspec
from starlette.types import Scope

from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin, public_location
from kvproxy.base.upstream.request import RepeatedFields
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.selector import Decision
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import RandomHex

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
#: A header line stays readable and small in any cluster.
_MAX_DESCRIBED = 8
_NAME = itemgetter(0)
_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_USUAL_CONNECTION = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close"})

#: Data-parallel rank for a request to vLLM and SGLang.
RANK_HEADER = b"x-data-parallel-rank"
#: Headers from proxies and schedulers to engines and their sidecars: the rank that serves, the engine that prefills,
#: the one that KV is pulled from.
ENGINE_HEADERS = frozenset(
    b"x-data-parallel-rank x-data-parallel-host-port x-prefiller-host-port x-encoder-hosts-ports "
    b"x-kv-cache-source-host-port".split()
)
#: Fields that differ in each request.
_OF_THIS_ONE = frozenset({b"content-length", b"traceparent", b"tracestate"})
#: Headers that clients repeat are converted once. They come from clients, so the cache starts over when it is full, and
#: long heads are not kept. (A dict, since every request reads it.)
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 4096
_Sent = tuple[tuple[bytes, bytes], ...]
#: The fields as sent, the client's address and scheme, and whether it is trusted.
_Sender = tuple[_Sent, str, str, bool]
_OWN = b"x-kvproxy-"  # most names sort before it, which is the cheapest test
#: Engine headers that are kept from clients: its software, and addresses of its own network.
_NOT_FROM_ENGINES = HOP_BY_HOP | {b"server", b"location", b"content-location"}


class RequestLoops(LocalReply):
    """The request went through this proxy before: an endpoint leads back to it."""

    def __init__(self) -> None:
        super().__init__(508, "loop", "This request came through this proxy before: an endpoint leads back to it.")


def _without_named_by_connection(headers: Headers, connection: bytes) -> Headers:
    """Drop what the sender declared hop-by-hop in `connection:`."""
    named = frozenset(token.strip().lower() for token in connection.split(b","))
    return [pair for pair in headers if pair[0] not in named]


def _set_apart(headers: Headers, names: frozenset[bytes]) -> tuple[_Sent, dict[bytes, bytes]]:
    """Return the fields but for those of these names, and the values of those; several of one name are joined."""
    rest = dict(headers)
    if len(rest) == len(headers):  # nearly always no name comes twice, and no field need be looked at
        found_once = {}
        for name in names & rest.keys():
            found_once[name] = rest.pop(name)
        return tuple(rest.items()), found_once
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in names:
            found.setdefault(name, []).append(value)
    kept = tuple([pair for pair in headers if pair[0] not in names])
    return kept, {name: b", ".join(values) for name, values in found.items()}


class RequestHeaders:
    """Conversion of the client's headers for an engine.

    Hop-by-hop headers and `dropped` ones are removed; the pool sets Host and body framing. `x-forwarded-*`, `via`,
    request id and a W3C trace parent (the client's if it is valid, else a new one) are added. Credentials are chosen
    per attempt. Headers between proxies and engines, `x-kvproxy-*` included, pass from trusted clients only, save for
    `own`: headers a filter of this proxy sets."""

    def __init__(
        self, *, request_id_header: bytes = b"x-request-id", dropped: Iterable[bytes] = (), own: Iterable[bytes] = ()
    ) -> None:
        self._id_header = request_id_header
        self._own = frozenset(own)
        self._random = RandomHex()
        self._pseudonym = b"kvproxy-" + self._random.take(16).encode()
        self.via = b"1.1 " + self._pseudonym
        self._of_this_one = _OF_THIS_ONE | {request_id_header}
        self._remembered: dict[_Sender, ClientFields] = {}
        forwarded = (b"host", b"expect", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"via")
        self._special = HOP_BY_HOP | ENGINE_HEADERS | {*forwarded, *dropped}

    def check_loop(self, via: bytes | None) -> None:
        """Raise RequestLoops when these hops (RFC 9110, 7.6.3) include this proxy."""
        if via is not None and self._pseudonym in via:
            raise RequestLoops

    def build_head(self, scope: Scope, *, request_id: str, trusted: bool = False) -> RequestHead:
        """One head for all attempts of a request. Raises RequestLoops, and UnsafeRequest."""
        of_this_one = self._of_this_one if request_id else _OF_THIS_ONE
        sent, found = _set_apart(scope["headers"], of_this_one)
        client = scope.get("client")
        sender = (sent, client[0] if client else "", scope["scheme"], trusted)
        repeated = self._remembered.get(sender) or self._remember(sender)
        parent = found.get(b"traceparent")
        if parent is not None and _TRACE_PARENT.fullmatch(parent):
            own = [(b"traceparent", parent)]
            if b"tracestate" in found:
                own.append((b"tracestate", found[b"tracestate"]))
        else:
            fresh = self._random.take(48)
            own = [(b"traceparent", f"00-{fresh[:32]}-{fresh[32:]}-00".encode())]
        if request_id:
            own.append((self._id_header, request_id.encode("latin-1")))
        return RequestHead(own, repeated)

    def _remember(self, sender: _Sender) -> ClientFields:
        fields = ClientFields(self._pass_on(*sender))
        fields.sent = frozenset(map(_NAME, sender[0]))
        # headers that are not forwarded are kept as well
        sent_bytes = sum(len(name) + len(value) for name, value in sender[0])
        if sent_bytes <= _MAX_REMEMBERED_BYTES:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[sender] = fields
        return fields

    def _pass_on(self, sent: _Sent, client: str, scheme: str, trusted: bool) -> Headers:
        """Return what engines get of the fields that a client sends with every request, and what is added to them."""
        special = self._special
        found: dict[bytes, bytes] = {}
        headers: Headers = []
        for pair in sent:
            name = pair[0]
            if name not in special:
                if name < _OWN or trusted or not name.startswith(_OWN) or name in self._own:
                    headers.append(pair)
            elif name in found:
                found[name] += b", " + pair[1]
            else:
                found[name] = pair[1]
        connection = found.get(b"connection")
        if connection is not None and connection not in _USUAL_CONNECTION:
            headers = _without_named_by_connection(headers, connection)
        if trusted:
            headers += [(name, found[name]) for name in ENGINE_HEADERS if name in found]
        via = found.get(b"via")
        if via is None:
            headers.append((b"via", self.via))
        else:
            self.check_loop(via)
            headers.append((b"via", via + b", " + self.via))
        earlier = found.get(b"x-forwarded-for")
        if client:
            address = client.encode()
            headers.append((b"x-forwarded-for", earlier + b", " + address if earlier else address))
        elif earlier:
            headers.append((b"x-forwarded-for", earlier))
        headers.append((b"x-forwarded-proto", scheme.encode()))
        if b"host" in found:
            headers.append((b"x-forwarded-host", found[b"host"]))
        return headers


class ClientFields(RepeatedFields):
    """Those of one client."""

    __slots__ = ("_anonymous", "rank", "sent")

    def __init__(self, headers: Headers) -> None:
        super().__init__(headers)
        self._anonymous: ClientFields | None = None
        self.rank = dict(headers).get(RANK_HEADER)  # data-parallel rank in the request
        self.sent: Collection[bytes] = ()  # names of all headers received

    @property
    def anonymous(self) -> ClientFields:
        """Without the client's credentials."""
        if self._anonymous is None:
            self._anonymous = ClientFields([pair for pair in self.headers if pair[0] not in CREDENTIALS])
        return self._anonymous


class RequestHead(msgspec.Struct):
    """Header fields for an engine: those of one request, and those the client's next one will have again."""

    own: Headers
    repeated: ClientFields

    @property
    def headers(self) -> Headers:
        return [*self.repeated.headers, *self.own]

    def with_credential(self, authorization: bytes) -> RequestHead:
        """For one attempt; an endpoint's own credential replaces whatever the client sent."""
        return RequestHead([*self.own, (b"authorization", authorization)], self.repeated.anonymous)

    def with_rank(self, number: int) -> RequestHead:
        """For one attempt, at the data-parallel rank of this number."""
        return RequestHead([*self.own, (RANK_HEADER, b"%d" % number)], self.repeated)

    def with_trace_parent(self, trace_parent: bytes) -> RequestHead:
        """For one attempt that is a span of its own."""
        own = [pair for pair in self.own if pair[0] != b"traceparent"]
        return RequestHead([*own, (b"traceparent", trace_parent)], self.repeated)


def response_headers(received: Headers, *, endpoint: bytes, origin: Origin | None = None) -> Headers:
    """Return the engine's headers without hop-by-hop ones and its own secrets, plus the endpoint that served.

    A redirect into the engine at `origin`, or to an address of a private network, becomes one on the client's own host.
    """
    headers: Headers = []
    connection = b""
    for pair in received:
        name = pair[0]
        if name not in _NOT_FROM_ENGINES:
            if name < _OWN or not name.startswith(_OWN):
                headers.append(pair)
        elif name == b"connection":
            connection = pair[1]
        elif name in (b"location", b"content-location"):
            headers.append((name, public_location(pair[1], origin)))
    if connection and connection not in _USUAL_CONNECTION:
        headers = _without_named_by_connection(headers, connection)
    headers.append((b"x-kvproxy-endpoint", endpoint))
    return headers


def describe_decision(decision: Decision[Endpoint], facts: OverlapFacts | None) -> str:
    """`policy=...; reason=...; matched=a:512/precise,b:16/approximate; costs=0.120,0.4`, the largest matches first."""
    parts = [f"policy={decision.policy}", f"reason={decision.reason}"]
    if decision.preference is not None:
        parts.append(f"preference={decision.preference}")
    if facts is not None:
        parts.append(f"prompt_tokens={facts.prompt_tokens}")
    if facts is not None and facts.searched:
        held = sorted(facts.by_endpoint.items(), key=lambda item: (-item[1].tokens, item[0]))[:_MAX_DESCRIBED]
        matched = ",".join(f"{endpoint}:{overlap.tokens}/{overlap.source}" for endpoint, overlap in held)
        parts.append(f"matched={matched or 'none'}")
    if decision.costs:
        parts.append("costs=" + ",".join(f"{cost:.4g}" for cost in decision.costs[:_MAX_DESCRIBED]))
    return "; ".join(parts)
