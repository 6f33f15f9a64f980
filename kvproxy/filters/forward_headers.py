"""Header lists on their way through: what goes upstream, what comes back. Built fresh for every attempt."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import Scope

from kvproxy.filters.random_hex import RandomHex
from kvproxy.types import Headers

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


def _without_named_by_connection(headers: Headers, connection: bytes) -> Headers:
    """Drops what the sender declared hop-by-hop in `connection:`."""
    named = frozenset(token.strip().lower() for token in connection.split(b","))
    return [pair for pair in headers if pair[0] not in named]


class RequestHeaders:
    """Makes the client's headers ready for an engine.

    Hop-by-hop headers and `dropped` ones go; Host and body framing are the pool's business. `x-forwarded-*`, request
    id and a W3C trace parent (the client's if it is valid, else a new one) come in. Credentials are chosen per attempt.
    """

    def __init__(self, *, request_id_header: bytes = b"x-request-id", dropped: Iterable[bytes] = ()) -> None:
        self._id_header = request_id_header
        self._random = RandomHex()
        self._special = HOP_BY_HOP | {
            b"host",
            b"content-length",
            b"expect",
            b"traceparent",
            b"tracestate",
            b"x-forwarded-for",
            b"x-forwarded-host",
            b"x-forwarded-proto",
            *dropped,
        }

    def build(self, scope: Scope, *, request_id: str) -> Headers:
        """One list for all attempts of a request; attempts copy it."""
        special = self._special
        found: dict[bytes, bytes] = {}
        headers: Headers = []
        id_header = self._id_header if request_id else None
        for pair in scope["headers"]:
            name = pair[0]
            if name not in special:
                if name != id_header:
                    headers.append(pair)
            elif name in found:
                found[name] += b", " + pair[1]
            else:
                found[name] = pair[1]
        connection = found.get(b"connection")
        if connection is not None and connection not in _USUAL_CONNECTION:
            headers = _without_named_by_connection(headers, connection)
        _add_forwarded(headers, found, scope)
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


def _add_forwarded(headers: Headers, found: dict[bytes, bytes], scope: Scope) -> None:
    client, earlier = scope.get("client"), found.get(b"x-forwarded-for")
    if client:
        address = client[0].encode()
        headers.append((b"x-forwarded-for", earlier + b", " + address if earlier else address))
    elif earlier:
        headers.append((b"x-forwarded-for", earlier))
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    if b"host" in found:
        headers.append((b"x-forwarded-host", found[b"host"]))


def with_credential(headers: Headers, authorization: bytes | None) -> Headers:
    """A new list for one attempt; an endpoint's own credential replaces whatever the client sent."""
    if authorization is None:
        return list(headers)
    own = [pair for pair in headers if pair[0] not in _CREDENTIALS]
    own.append((b"authorization", authorization))
    return own


def with_trace_parent(headers: Headers, trace_parent: bytes) -> Headers:
    """A new list for one attempt that is a span of its own."""
    return [*(pair for pair in headers if pair[0] != b"traceparent"), (b"traceparent", trace_parent)]


def response_headers(received: Headers, *, endpoint: bytes) -> Headers:
    """The engine's headers without hop-by-hop ones, plus who served."""
    headers: Headers = []
    connection = b""
    for pair in received:
        if pair[0] not in HOP_BY_HOP:
            headers.append(pair)
        elif pair[0] == b"connection":
            connection = pair[1]
    if connection and connection not in _USUAL_CONNECTION:
        headers = _without_named_by_connection(headers, connection)
    headers.append((b"x-kvproxy-endpoint", endpoint))
    return headers
