"""What of a client's and an engine's headers passes, and what does not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvproxy.filters.forward_headers import RequestHeaders, response_headers, with_credential
from kvproxy.types import Headers

#: RFC 9110 (7.6.1), and what RFC 2616 (13.5.1) named besides.
HOP_BY_HOP = [b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-authenticate",
              b"proxy-authorization", b"proxy-connection"]  # fmt: skip


def scope(headers: Headers, **more: Any) -> dict[str, Any]:
    return {"type": "http", "scheme": "http", "client": ("192.0.2.7", 4711), "headers": headers, **more}


def built(headers: Headers, *, request_id: str = "", **more: Any) -> dict[bytes, bytes]:
    pairs = RequestHeaders().build(scope(headers, **more), request_id=request_id)
    assert len({name for name, _ in pairs}) == len(pairs), "no header twice"
    return dict(pairs)


@pytest.mark.parametrize(
    "name",
    [*HOP_BY_HOP, b"host", b"content-length", b"expect"],
)
def test_hop_by_hop_and_framing_headers_stop_here(name: bytes) -> None:
    """They belong to the client's connection, not to ours."""
    assert name not in built([(name, b"close"), (b"accept", b"*/*")])


@pytest.mark.parametrize("name", HOP_BY_HOP)
def test_hop_by_hop_headers_of_an_engine_stop_here_too(name: bytes) -> None:
    """They belong to the connection between the two of us."""
    assert response_headers([(name, b"close"), (b"etag", b"1")], endpoint=b"e1") == [
        (b"etag", b"1"), (b"x-kvproxy-endpoint", b"e1")
    ]  # fmt: skip


def test_headers_named_by_connection_stop_here() -> None:
    """`connection: x-secret` makes x-secret hop-by-hop (RFC 9110, 7.6.1)."""
    headers = built([(b"connection", b"close, X-Secret"), (b"x-secret", b"1"), (b"x-open", b"2")])
    assert b"x-secret" not in headers
    assert headers[b"x-open"] == b"2"


def test_connection_given_twice_is_read_whole() -> None:
    """A second `connection` header names headers too."""
    headers = built([(b"connection", b"close"), (b"connection", b"x-a"), (b"x-a", b"1")])
    assert b"x-a" not in headers


def test_the_client_address_is_appended() -> None:
    """An engine behind several proxies sees all of them in order."""
    headers = built([(b"x-forwarded-for", b"198.51.100.1"), (b"host", b"api.example")])
    assert headers[b"x-forwarded-for"] == b"198.51.100.1, 192.0.2.7"
    assert headers[b"x-forwarded-host"] == b"api.example"
    assert headers[b"x-forwarded-proto"] == b"http"


def test_without_a_client_address_the_earlier_ones_stay() -> None:
    """Under a unix socket the server knows no address."""
    assert built([(b"x-forwarded-for", b"198.51.100.1")], client=None)[b"x-forwarded-for"] == b"198.51.100.1"


def test_a_forged_proto_is_replaced() -> None:
    """What the scheme was, this proxy knows best."""
    assert built([(b"x-forwarded-proto", b"https")])[b"x-forwarded-proto"] == b"http"


def test_a_valid_trace_parent_passes_with_its_state() -> None:
    """The client's trace goes through unbroken."""
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = built([(b"traceparent", parent), (b"tracestate", b"a=1")])
    assert headers[b"traceparent"] == parent
    assert headers[b"tracestate"] == b"a=1"


@pytest.mark.parametrize("given", [None, b"garbage", b"00-xyz-b7ad6b7169203331-01"])
def test_a_missing_or_bad_trace_parent_is_begun_anew(given: bytes | None) -> None:
    """And then the client's trace state means nothing any more."""
    headers = built([(b"tracestate", b"a=1")] + ([(b"traceparent", given)] if given else []))
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-00", headers[b"traceparent"])
    assert b"tracestate" not in headers


def test_the_request_id_replaces_the_clients() -> None:
    """What the log says is what the engine says."""
    assert built([(b"x-request-id", b"theirs")], request_id="ours")[b"x-request-id"] == b"ours"
    assert built([(b"x-request-id", b"theirs")])[b"x-request-id"] == b"theirs"


def test_an_endpoints_own_key_replaces_the_clients_in_a_new_list() -> None:
    """One endpoint's credential never stays in the list the next attempt copies."""
    base: Headers = [(b"authorization", b"Bearer client"), (b"x-api-key", b"client"), (b"accept", b"*/*")]
    assert with_credential(base, b"Bearer own") == [(b"accept", b"*/*"), (b"authorization", b"Bearer own")]
    untouched = with_credential(base, None)
    assert untouched == base
    assert untouched is not base


def test_response_headers_keep_their_order_and_repeats() -> None:
    """set-cookie may come twice; hop-by-hop headers end at us; the endpoint is named."""
    received: Headers = [(b"set-cookie", b"a"), (b"connection", b"x-gone"), (b"x-gone", b"1"), (b"set-cookie", b"b"),
                         (b"transfer-encoding", b"chunked")]  # fmt: skip
    assert response_headers(received, endpoint=b"e1") == [
        (b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"x-kvproxy-endpoint", b"e1")
    ]  # fmt: skip
