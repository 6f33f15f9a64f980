"""Messages of Envoy's external processor and their answers, by the endpoint picker protocol v1.0.0.

Its message classes are those of `protocol.py`; constant answers are encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from kvproxy.base.types import Headers
from kvproxy.features.picker.protocol import ProcessingRequest, ProcessingResponse
from kvproxy.proxy.forward.headers import RANK_HEADER
from kvproxy.proxy.request.error_reply import LocalReply, error_body

__all__ = ["DecodeError", "ProcessingRequest"]

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
_BALANCER = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
#: Where Envoy puts `response_attributes`.
_ATTRIBUTES = "envoy.filters.http.ext_proc"
#: Headers that only kvproxy may set: a client that sends them would choose its engine.
FORGEABLE = (DESTINATION, SERVED, SUBSET, RANK_HEADER.decode())
#: Envoy takes pieces of a streamed body up to 64 KiB.
_PIECE_BYTES = 62 * 1024
_OVERWRITE = 2

#: A decoded message; its class is generated at import.
Message: TypeAlias = Any


class BodyMode(IntEnum):
    """How Envoy sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


def body_modes(message: Message) -> tuple[int, int]:
    """Return the modes of request and response bodies. Envoy sends them once, with its first message; without them it
    buffers requests."""
    if not message.HasField("protocol_config"):
        return BodyMode.BUFFERED, BodyMode.NONE
    return message.protocol_config.request_body_mode, message.protocol_config.response_body_mode


def header_fields(headers: Message) -> Headers:
    """Names (in lower case, pseudo headers among them) and values."""
    return [
        (field.key.encode(), field.raw_value or field.value.encode("utf-8", "surrogateescape"))
        for field in headers.headers.headers
    ]


def subset_of(message: Message) -> frozenset[str] | None:
    """Return the addresses that may be picked, all that Envoy's route has; None: no hint."""
    hints = message.metadata_context.filter_metadata
    if _SUBSET_HINT not in hints or SUBSET not in hints[_SUBSET_HINT].fields:
        return None
    hint = hints[_SUBSET_HINT].fields[SUBSET]
    if hint.WhichOneof("kind") == "list_value":
        named: Iterable[str] = [each.string_value for each in hint.list_value.values]
    else:
        named = hint.string_value.split(",")
    return frozenset(address for each in named if (address := each.strip()))


class Beginning(NamedTuple):
    """Contents of the first message of a request."""

    method: str
    path: str
    headers: Headers
    request_mode: int
    response_mode: int
    subset: frozenset[str] | None
    ended: bool  # it has no body


def read_beginning(message: Message) -> Beginning:
    """From the request's headers."""
    headers = header_fields(message.request_headers)
    about = dict(headers)
    method = about.get(b":method", b"").decode("latin-1")
    path = about.get(b":path", b"").decode("latin-1")
    ended = message.request_headers.end_of_stream
    return Beginning(method, path, headers, *body_modes(message), subset_of(message), ended)


def read_answer(message: Message) -> tuple[int, Headers]:
    """Status (0: none) and header fields of a response."""
    headers = header_fields(message.response_headers)
    status = dict(headers).get(b":status", b"")
    return int(status) if status.isdigit() else 0, headers


def served_by(message: Message) -> tuple[str, str]:
    """Return the address that answered, by the picker protocol's metadata or Envoy's own attribute ("": not reported),
    and why Envoy answered itself ("": it did not, or does not report it)."""
    address = details = ""
    if _ATTRIBUTES in message.attributes:
        fields = message.attributes[_ATTRIBUTES].fields
        if "upstream.address" in fields:
            address = fields["upstream.address"].string_value
        if "response.code_details" in fields:
            details = fields["response.code_details"].string_value
    metadata = message.metadata_context.filter_metadata
    if _BALANCER in metadata and SERVED in metadata[_BALANCER].fields:
        address = metadata[_BALANCER].fields[SERVED].string_value or address
    return address.strip(), "" if details == "via_upstream" else details


def _encoded(**fields: Any) -> bytes:
    raw: bytes = ProcessingResponse(**fields).SerializeToString()
    return raw


#: A client's own values of our headers are removed at once, whatever becomes of this stream.
REQUEST_HEADERS_TAKEN = _encoded(request_headers={"response": {"header_mutation": {"remove_headers": FORGEABLE}}})
REQUEST_BODY_TAKEN = _encoded(request_body={})
REQUEST_TRAILERS_TAKEN = _encoded(request_trailers={})
RESPONSE_HEADERS_TAKEN = _encoded(response_headers={})
RESPONSE_BODY_TAKEN = _encoded(response_body={})
RESPONSE_TRAILERS_TAKEN = _encoded(response_trailers={})


def picked(
    destinations: Sequence[str], headers: Mapping[str, str], *, with_body: bool, body: bytes | None = None
) -> bytes:
    """Where to: as header and as metadata, alike. The answer to the whole body, else to the headers; `body` replaces
    the client's."""
    message = ProcessingResponse()
    part = message.request_body if with_body else message.request_headers
    common = part.response
    where = ",".join(destinations)
    common.clear_route_cache = True
    _set_headers(common.header_mutation, {**headers, DESTINATION: where})
    if not with_body:
        common.header_mutation.remove_headers.extend(
            [name for name in FORGEABLE if name != DESTINATION and name not in headers]
        )
    if body is not None and with_body:
        common.body_mutation.body = body
        _set_headers(common.header_mutation, {"content-length": str(len(body))})
    elif body is not None:
        common.header_mutation.remove_headers.append("content-length")  # Envoy frames the body itself
    message.dynamic_metadata.fields[_BALANCER].struct_value.fields[DESTINATION].string_value = where
    raw: bytes = message.SerializeToString()
    return raw


def request_pieces(body: bytes, *, ended: bool) -> Iterable[tuple[bytes, memoryview]]:
    """Return the answers that send a request's body on in full duplex, each before a piece of it, which is its end.
    `ended`: no trailers follow."""
    whole = memoryview(body)
    for start in range(0, len(body) or ended, _PIECE_BYTES):
        piece = whole[start : start + _PIECE_BYTES]
        yield _streamed("request_body", len(piece), ended=ended and start + _PIECE_BYTES >= len(body)), piece


def response_piece(piece: bytes, *, ended: bool) -> bytes:
    """Return the answer before a piece of a response, which is its end, that sends it on in full duplex."""
    return _streamed("response_body", len(piece), ended=ended)


def _streamed(part: str, size: int, *, ended: bool) -> bytes:
    """Return a streamed body's message up to its `size` bytes, by hand: a message class copies them three times."""
    raw = (b"\x10\x01\x0a" if ended else b"\x0a") + _varint(size)  # StreamedBodyResponse: end_of_stream, body
    for tag in (b"\x1a", b"\x1a", b"\x0a", _STREAMED[part]):  # streamed_response, body_mutation, response, the part
        raw = tag + _varint(len(raw) + size) + raw
    return raw


_STREAMED = {"request_body": b"\x1a", "response_body": b"\x22"}


def _varint(number: int) -> bytes:
    raw = b""
    while number > 0x7F:
        raw += bytes((number & 0x7F | 0x80,))
        number >>= 7
    return raw + bytes((number,))


def served_headers(endpoint: str, request_id: str = "") -> bytes:
    """Return the answer to a response's headers, which names the endpoint to the client, and gives it back the id it
    sent, if the engine got another one."""
    message = ProcessingResponse()
    headers = {"x-kvproxy-endpoint": endpoint} | ({"x-request-id": request_id} if request_id else {})
    _set_headers(message.response_headers.response.header_mutation, headers)
    raw: bytes = message.SerializeToString()
    return raw


def refused(why: LocalReply, path: str) -> bytes:
    """Envoy answers the client of `path` with this."""
    message = ProcessingResponse()
    reply = message.immediate_response
    reply.status.code = why.status
    reply.details = f"kvproxy_{why.reason}"
    reply.body = error_body(path, why.status, reason=why.reason, message=str(why))
    headers = {name.decode(): value.decode() for name, value in why.headers}
    _set_headers(reply.headers, headers | {"content-type": "application/json"})
    raw: bytes = message.SerializeToString()
    return raw


def _set_headers(mutation: Message, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = _OVERWRITE
