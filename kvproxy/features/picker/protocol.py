"""The messages of Envoy's external processing and of gRPC's health service, with the fields a picker reads or writes.

Built at import from numbers and types as of Envoy 1.40 (`envoy/service/ext_proc/v3/external_processor.proto` and what
it imports, `grpc/health/v1/health.proto`); the classes are protobuf's own, C inside. The generated package of all of
Envoy's messages brings OpenTelemetry's along, and so overwrites those of OpenTelemetry's own package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import DESCRIPTOR as STRUCT_FILE

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
