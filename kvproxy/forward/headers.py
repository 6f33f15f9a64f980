"""Header lists on their way through: what goes upstream, what comes back. Built fresh for every attempt."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import Scope

from kvproxy.request.error_reply import LocalReply
from kvproxy.request.random_hex import RandomHex
from kvproxy.types import Headers
from kvproxy.upstream.origin import Origin

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_USUAL_CONNECTION = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close"})

#: What proxies and schedulers tell engines and their sidecars: the rank that serves, the engine that prefills, the one
#: that KV is pulled from.
ENGINE_HEADERS = frozenset(
    {
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
    }
)
_OWN = b"x-kvproxy-"  # most names sort before it, which is the cheapest test
#: Not for clients as an engine says it: its software, and addresses of its own network.
_NOT_FROM_ENGINES = HOP_BY_HOP | {b"server", b"location", b"content-location"}


class RequestLoops(LocalReply):
    """The request went through this proxy before: an endpoint leads back to it."""

    def __init__(self) -> None:
        super().__init__(508, "loop", "This request came through this proxy before: an endpoint leads back to it.")


def _without_named_by_connection(headers: Headers, connection: bytes) -> Headers:
    """Drops what the sender declared hop-by-hop in `connection:`."""
    named = frozenset(token.strip().lower() for token in connection.split(b","))
    return [pair for pair in headers if pair[0] not in named]


class RequestHeaders:
    """Makes the client's headers ready for an engine.

    Hop-by-hop headers and `dropped` ones go; Host and body framing are the pool's business. `x-forwarded-*`, `via`,
    request id and a W3C trace parent (the client's if it is valid, else a new one) come in. Credentials are chosen per
    attempt. What is between proxies and engines, `x-kvproxy-*` included, passes from trusted clients only, save for
    `own`: headers a filter of this proxy sets.
    """

    def __init__(
        self, *, request_id_header: bytes = b"x-request-id", dropped: Iterable[bytes] = (), own: Iterable[bytes] = ()
    ) -> None:
        self._id_header = request_id_header
        self._own = frozenset(own)
        self._random = RandomHex()
        self._pseudonym = b"kvproxy-" + self._random.take(16).encode()
        self.via = b"1.1 " + self._pseudonym
        self._special = (
            HOP_BY_HOP
            | ENGINE_HEADERS
            | {
                b"host",
                b"content-length",
                b"expect",
                b"traceparent",
                b"tracestate",
                b"x-forwarded-for",
                b"x-forwarded-host",
                b"x-forwarded-proto",
                b"via",
                *dropped,
            }
        )

    def check_loop(self, via: bytes | None) -> None:
        """Raises RequestLoops when these hops (RFC 9110, 7.6.3) include this proxy."""
        if via is not None and self._pseudonym in via:
            raise RequestLoops

    def build(self, scope: Scope, *, request_id: str, trusted: bool = False) -> Headers:
        """One list for all attempts of a request; attempts copy it. Raises RequestLoops."""
        special = self._special
        found: dict[bytes, bytes] = {}
        headers: Headers = []
        id_header = self._id_header if request_id else None
        for pair in scope["headers"]:
            name = pair[0]
            if name not in special:
                if name != id_header and (name < _OWN or trusted or not name.startswith(_OWN) or name in self._own):
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
        client, earlier = scope.get("client"), found.get(b"x-forwarded-for")
        if client:
            address = client[0].encode()
            headers.append((b"x-forwarded-for", earlier + b", " + address if earlier else address))
        elif earlier:
            headers.append((b"x-forwarded-for", earlier))
        headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
        if b"host" in found:
            headers.append((b"x-forwarded-host", found[b"host"]))
        parent = found.get(b"traceparent")
        if parent is not None and _TRACE_PARENT.fullmatch(parent):
            headers.append((b"traceparent", parent))
            if b"tracestate" in found:
                headers.append((b"tracestate", found[b"tracestate"]))
        else:
            fresh = self._random.take(48)
            headers.append((b"traceparent", f"00-{fresh[:32]}-{fresh[32:]}-00".encode()))
        if id_header is not None:
            headers.append((id_header, request_id.encode("latin-1")))
        return headers


def with_credential(headers: Headers, authorization: bytes) -> Headers:
    """A new list for one attempt; an endpoint's own credential replaces whatever the client sent."""
    own = [pair for pair in headers if pair[0] not in _CREDENTIALS]
    own.append((b"authorization", authorization))
    return own


def with_trace_parent(headers: Headers, trace_parent: bytes) -> Headers:
    """A new list for one attempt that is a span of its own."""
    return [*(pair for pair in headers if pair[0] != b"traceparent"), (b"traceparent", trace_parent)]


def response_headers(received: Headers, *, endpoint: bytes, origin: Origin | None = None) -> Headers:
    """The engine's headers without hop-by-hop ones and its own secrets, plus the endpoint that served.

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
            headers.append((name, _public_location(pair[1], origin)))
    if connection and connection not in _USUAL_CONNECTION:
        headers = _without_named_by_connection(headers, connection)
    headers.append((b"x-kvproxy-endpoint", endpoint))
    return headers


def _public_location(location: bytes, origin: Origin | None) -> bytes:
    """Relative ones and those to public hosts stay."""
    try:
        parts = urlsplit(location.decode("latin-1"))
        host = parts.hostname or ""
    except ValueError:
        return b"/"
    if not parts.netloc or not (
        _is_internal(host) or (origin is not None and host in (origin.host.lower(), origin.server_name.lower()))
    ):
        return location
    path = parts.path or "/"
    base = "" if origin is None else origin.base_path.decode("ascii")
    if base and (path + "/").startswith(base + "/"):
        path = path[len(base) :] or "/"
    return (f"/{path.lstrip('/')}" + (f"?{parts.query}" if parts.query else "")).encode("latin-1")


def _is_internal(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return False
