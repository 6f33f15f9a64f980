"""Messages of Envoy's external processing and of gRPC's health service, with the fields a picker reads or writes, and
the answers by the endpoint picker protocol v1.0.0. Constant answers are encoded once.

The classes are built at import from numbers and types as of Envoy 1.40
(`envoy/service/ext_proc/v3/external_processor.proto` and what it imports, `grpc/health/v1/health.proto`) and are
protobuf's own, C inside. The generated package of all of Envoy's messages brings OpenTelemetry's along, and so
overwrites those of OpenTelemetry's own package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import DESCRIPTOR as STRUCT_FILE

from kvproxy.base.types import Headers
from kvproxy.proxy.forward.headers import RANK_HEADER
from kvproxy.proxy.request.error_reply import LocalReply, error_body

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS = f"/{EXT_PROC}/Process"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"

_PACKAGE = "kvproxy.picker"
_STRUCT = "google.protobuf.Struct"
_TYPES = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "enum": FieldDescriptorProto.TYPE_INT32,  # the same on the wire, and unknown values are kept
    "string": FieldDescriptorProto.TYPE_STRING,
}

#: Field: number and type. `[]` is a list, `{}` a map of strings to it, `|` one of a group that excludes each other.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "ProcessingRequest": {
        "request_headers": (2, "|HttpHeaders"),
        "response_headers": (3, "|HttpHeaders"),
        "request_body": (4, "|HttpBody"),
        "response_body": (5, "|HttpBody"),
        "request_trailers": (6, "|HttpTrailers"),
        "response_trailers": (7, "|HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, f"{{}}{_STRUCT}"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "HeaderMap": {"headers": (1, "[]HeaderValue")},
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "Metadata": {"filter_metadata": (1, f"{{}}{_STRUCT}")},
    "ProtocolConfiguration": {"request_body_mode": (1, "enum"), "response_body_mode": (2, "enum")},
    "ProcessingResponse": {
        "request_headers": (1, "|CommonReply"),
        "response_headers": (2, "|CommonReply"),
        "request_body": (3, "|CommonReply"),
        "response_body": (4, "|CommonReply"),
        "request_trailers": (5, "|TrailersResponse"),
        "response_trailers": (6, "|TrailersResponse"),
        "immediate_response": (7, "|ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
    "CommonReply": {"response": (1, "CommonResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeaderMutation": {"set_headers": (1, "[]HeaderValueOption"), "remove_headers": (2, "[]string")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "enum")},
    "BodyMutation": {"body": (1, "|bytes"), "streamed_response": (3, "|StreamedBodyResponse")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "HttpStatus": {"code": (1, "enum")},
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "enum")},
}


#: Names of groups of fields.
_GROUPS = {"ProcessingRequest": "request", "ProcessingResponse": "response", "BodyMutation": "mutation"}


def _describe_message(name: str, fields: Mapping[str, tuple[int, str]]) -> DescriptorProto:
    message = DescriptorProto(name=name)
    if name in _GROUPS:
        message.oneof_decl.add(name=_GROUPS[name])
    for field, (number, kind) in fields.items():
        described = message.field.add(name=field, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if kind.startswith(("[]", "{}")):
            described.label = FieldDescriptorProto.LABEL_REPEATED
        if kind.startswith("{}"):
            entry = message.nested_type.add(name=f"{field.title()}Entry".replace("_", ""))
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=_TYPES["string"], label=FieldDescriptorProto.LABEL_OPTIONAL)
            _set_type(entry.field.add(name="value", number=2, label=FieldDescriptorProto.LABEL_OPTIONAL), kind[2:])
            _set_type(described, f"{_PACKAGE}.{name}.{entry.name}")
        else:
            _set_type(described, kind.lstrip("[]|"))
        if kind.startswith("|"):
            described.oneof_index = 0
    return message


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{kind}" if "." in kind else f".{_PACKAGE}.{kind}"


def _build_messages() -> dict[str, Any]:
    pool = Default()
    file = FileDescriptorProto(name="kvproxy_picker.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(STRUCT_FILE.name)
    file.message_type.extend([_describe_message(name, fields) for name, fields in _MESSAGES.items()])
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


_CLASSES = _build_messages()
ProcessingRequest = _CLASSES["ProcessingRequest"]
ProcessingResponse = _CLASSES["ProcessingResponse"]
HeaderMap = _CLASSES["HeaderMap"]
HeaderValue = _CLASSES["HeaderValue"]
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
HealthCheckResponse = _CLASSES["HealthCheckResponse"]
SERVING = 1
NOT_SERVING = 2
UNKNOWN = 3


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
