"""Headers of clients and engines that pass, and those that do not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvproxy.base.errors import UnsafeRequest
from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin
from kvproxy.proxy.forward.headers import RequestHead, RequestHeaders, RequestLoops, response_headers

#: RFC 9110 (7.6.1), and what RFC 2616 (13.5.1) named besides.
HOP_BY_HOP = [b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-authenticate",
              b"proxy-authorization", b"proxy-connection"]  # fmt: skip


def scope(headers: Headers, **more: Any) -> dict[str, Any]:
    return {"type": "http", "scheme": "http", "client": ("192.0.2.7", 4711), "headers": headers, **more}


def built(headers: Headers, *, request_id: str = "", **more: Any) -> dict[bytes, bytes]:
    pairs = RequestHeaders().build_head(scope(headers, **more), request_id=request_id).headers
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
    for named in ((b"close", b"x-a"), (b"x-a", b"close")):
        headers = built([*((b"connection", value) for value in named), (b"x-a", b"1")])
        assert b"x-a" not in headers


def test_a_list_given_in_several_headers_is_one() -> None:
    """Proxies may add lines of their own: no hop is lost (RFC 9110, 5.3)."""
    headers = built([(b"x-forwarded-for", b"198.51.100.1"), (b"x-forwarded-for", b"198.51.100.2")])
    assert headers[b"x-forwarded-for"] == b"198.51.100.1, 198.51.100.2, 192.0.2.7"


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
    """This proxy is the best source of the scheme."""
    assert built([(b"x-forwarded-proto", b"https")])[b"x-forwarded-proto"] == b"http"


def test_a_valid_trace_parent_passes_with_its_state() -> None:
    """The client's trace goes through unbroken."""
    parent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = built([(b"traceparent", parent), (b"tracestate", b"a=1")])
    assert headers[b"traceparent"] == parent
    assert headers[b"tracestate"] == b"a=1"


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"garbage",
        b"00-xyz-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
    ],
)
def test_a_missing_or_bad_trace_parent_is_begun_anew(given: bytes | None) -> None:
    """And then the client's trace state means nothing any more."""
    headers = built([(b"tracestate", b"a=1")] + ([(b"traceparent", given)] if given else []))
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-00", headers[b"traceparent"])
    assert b"tracestate" not in headers


def test_the_request_id_replaces_the_clients() -> None:
    """The log and the engine have the same id."""
    assert built([(b"x-request-id", b"theirs")], request_id="ours")[b"x-request-id"] == b"ours"
    assert built([(b"x-request-id", b"theirs")])[b"x-request-id"] == b"theirs"


def test_an_endpoints_own_key_replaces_the_clients_for_one_attempt() -> None:
    """One endpoint's credential never stays in what the next attempt, or the next request, begins from."""
    headers = RequestHeaders()
    sent: Headers = [(b"authorization", b"Bearer client"), (b"x-api-key", b"client"), (b"accept", b"*/*")]
    head = headers.build_head(scope(sent), request_id="")
    before = head.headers
    for _ in range(2):
        own = dict(head.with_credential(b"Bearer own").headers)
        assert own[b"authorization"] == b"Bearer own"
        assert b"x-api-key" not in own
        assert own[b"accept"] == b"*/*"
    assert head.headers == before
    assert dict(headers.build_head(scope(sent), request_id="").headers)[b"authorization"] == b"Bearer client"


def test_an_attempts_own_span_replaces_the_requests() -> None:
    """Each attempt is a span of its own; the others keep theirs."""
    head = RequestHeaders().build_head(scope([(b"accept", b"*/*")]), request_id="a")
    before = head.headers
    names = [name for name, _ in head.with_trace_parent(b"00-1").headers]
    assert names.count(b"traceparent") == 1
    assert dict(head.with_trace_parent(b"00-1").headers)[b"traceparent"] == b"00-1"
    assert head.headers == before


def test_repeated_heads_are_worked_out_once_a_client() -> None:
    """Length, trace and id are those of one request; another address, another scheme or trust is another client."""
    headers = RequestHeaders()

    def sent(number: int, **more: Any) -> RequestHead:
        pairs = [(b"host", b"h"), (b"content-length", b"%d" % number), (b"traceparent", b"%d" % number)]
        return headers.build_head(scope(pairs, **more), request_id=str(number))

    first, second = sent(1), sent(2)
    assert first.repeated is second.repeated
    assert first.own != second.own
    for other in (sent(3, client=("192.0.2.8", 1)), sent(3, scheme="https")):
        assert other.repeated is not first.repeated
    rank = [(b"x-data-parallel-rank", b"1")]
    untrusted = headers.build_head(scope(rank), request_id="")
    trusted = headers.build_head(scope(rank), request_id="", trusted=True)
    assert rank[0] in trusted.headers
    assert rank[0] not in untrusted.headers


def test_memory_of_clients_is_bounded() -> None:
    """In number, and long heads are not kept, nor those of which little is passed on."""
    headers = RequestHeaders()
    for name in (b"a", b"x-kvproxy-a"):
        long = scope([(name, b"b" * 5000)])
        assert headers.build_head(long, request_id="").repeated is not headers.build_head(long, request_id="").repeated
    first = headers.build_head(scope([]), request_id="").repeated
    assert headers.build_head(scope([]), request_id="").repeated is first
    for number in range(1100):
        headers.build_head(scope([(b"a", b"%d" % number)]), request_id="")
    assert headers.build_head(scope([]), request_id="").repeated is not first


def test_a_field_that_no_request_may_have_is_refused() -> None:
    """Before an endpoint is chosen, every time."""
    headers = RequestHeaders()
    for _ in range(2):
        with pytest.raises(UnsafeRequest):
            headers.build_head(scope([(b"a b", b"c")]), request_id="")


def test_response_headers_keep_their_order_and_repeats() -> None:
    """set-cookie may come twice; hop-by-hop headers end at us; the endpoint is named."""
    received: Headers = [(b"set-cookie", b"a"), (b"connection", b"x-gone"), (b"x-gone", b"1"), (b"set-cookie", b"b"),
                         (b"transfer-encoding", b"chunked")]  # fmt: skip
    assert response_headers(received, endpoint=b"e1") == [
        (b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"x-kvproxy-endpoint", b"e1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [b"x-data-parallel-rank", b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port",
     b"x-kv-cache-source-host-port", b"x-kvproxy-endpoint", b"x-kvproxy-anything"],
)  # fmt: skip
def test_engine_steering_fields_are_for_trusted_clients_only(name: bytes) -> None:
    """A rank or a peer to pull KV from is for schedulers to name."""
    headers = [(name, b"1"), (b"x-other", b"2")]
    assert name not in built(headers)
    assert built(headers)[b"x-other"] == b"2"
    trusted = dict(RequestHeaders().build_head(scope(headers), request_id="", trusted=True).headers)
    assert trusted[name] == b"1"


def test_a_header_of_the_proxys_own_filters_passes() -> None:
    """`kvcache` may be told to name the preferred endpoint in such a one."""
    own = RequestHeaders(own=[b"x-kvproxy-preferred"])
    assert (b"x-kvproxy-preferred", b"a") in own.build_head(
        scope([(b"x-kvproxy-preferred", b"a")]), request_id=""
    ).headers


def test_a_request_that_was_here_before_is_told_by_via() -> None:
    """Only by this proxy's own name, wherever it stands among the hops."""
    headers = RequestHeaders()
    with pytest.raises(RequestLoops):
        headers.build_head(scope([(b"via", b"1.1 a, " + headers.via + b", 1.1 b")]), request_id="")
    other = RequestHeaders().via
    assert (b"via", other + b", " + headers.via) in headers.build_head(scope([(b"via", other)]), request_id="").headers


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        (b"http://engine:8000/base/v1/x?a=%2F", b"/v1/x?a=%2F"),
        (b"http://ENGINE:8000/base", b"/"),
        (b"http://engine/other", b"/other"),
        (b"http://engine:8000//evil.example/x", b"/evil.example/x"),
        (b"//engine/x", b"/x"),
        (b"http://192.168.1.1/x", b"/x"),
        (b"http://[::1]:9/x", b"/x"),
        (b"http://localhost", b"/"),
        (b"http://[broken/x", b"/"),
        (b"https://storage.example/x", b"https://storage.example/x"),
        (b"http://8.8.8.8/x", b"http://8.8.8.8/x"),
        (b"/v1/x", b"/v1/x"),
        (b"x?y", b"x?y"),
    ],
)
def test_locations_tell_no_address_of_an_engine(location: bytes, seen: bytes) -> None:
    """A redirect into the engine is one on the client's own host."""
    origin = Origin.parse("http://engine:8000/base")
    for name in (b"location", b"content-location"):
        assert (name, seen) in response_headers([(name, location)], endpoint=b"a", origin=origin)


def test_an_engine_cannot_speak_as_the_proxy() -> None:
    """`x-kvproxy-*` in an answer is ours alone, so that a client may rely on it."""
    received = [(b"x-kvproxy-decision", b"forged"), (b"x-kvproxy-endpoint", b"other"), (b"x-own", b"1")]
    assert response_headers(received, endpoint=b"a") == [(b"x-own", b"1"), (b"x-kvproxy-endpoint", b"a")]
