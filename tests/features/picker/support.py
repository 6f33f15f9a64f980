"""A picker on loopback, and a gRPC client that plays Envoy's part in one request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from kvproxy.app import Proxy
from kvproxy.base.types import EndpointId
from kvproxy.features.picker.messages import (
    DESTINATION,
    PROCESS,
    SERVED,
    SUBSET,
    BodyMode,
    HeaderMap,
    HeaderValue,
    Message,
    ProcessingRequest,
    ProcessingResponse,
)
from kvproxy.features.picker.server import PickerServer
from kvproxy.operate.config.load import load_config

A, B, C = "127.0.0.1:9", "127.0.0.1:10", "127.0.0.1:11"
PATH = "/v1/chat/completions"
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":600,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":512}}}'
)
LIMIT_S = 30.0


@dataclass
class Picker:
    """A picker that serves."""

    proxy: Proxy
    server: PickerServer
    channel: grpc.aio.Channel

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value; 0 when it was never counted."""
        return self.proxy.metrics.registry.get_sample_value(name, labels) or 0.0

    def in_flight(self) -> dict[EndpointId, int]:
        """By endpoint."""
        return {each.id: each.load.in_flight for each in self.proxy.clusters["default"].endpoints}

    def ask(self, **options: Any) -> Envoy:
        """Return a new stream."""
        return Envoy(begin_stream(self.channel), **options)


def begin_stream(channel: grpc.aio.Channel, **options: Any) -> Any:
    """Return a call of the external processor."""
    method = channel.stream_stream(
        PROCESS,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    return method(**options)


@contextlib.asynccontextmanager
async def running_picker(*, picker: Mapping[str, Any] | None = None, **config: Any) -> AsyncIterator[Picker]:
    """Over three endpoints, unless the configuration says otherwise."""
    endpoints = {"a": f"http://{A}", "b": f"http://{B}", "c": f"http://{C}"}
    raw = {"endpoints": endpoints, "policy": "kv_aware", "health": {"active": False}, "shutdown": {"drain": "1s"},
           "picker": {"port": 0, **(picker or {})}, **config}  # fmt: skip
    loaded = load_config(raw)
    assert loaded.picker is not None
    async with (
        Proxy(loaded) as proxy,
        PickerServer(proxy, loaded.picker) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield Picker(proxy, server, channel)


def chat(content: str = "hello " * 300, **fields: Any) -> bytes:
    """Return the body of a chat request."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


@dataclass
class Envoy:
    """Envoy's part in one request: sends what it would send, and reads what it would obey."""

    call: Any
    request_mode: int = BodyMode.BUFFERED
    response_mode: int = BodyMode.NONE
    subset: Sequence[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    chosen: str = ""  # once it is

    async def say(self, **fields: Any) -> None:
        """Send one message."""
        async with asyncio.timeout(LIMIT_S):
            await self.call.write(ProcessingRequest(**fields))

    async def hear(self) -> Message:
        """Return the next answer."""
        async with asyncio.timeout(LIMIT_S):
            answer = await self.call.read()
        assert answer is not grpc.aio.EOF, await self.status()
        return answer

    async def status(self) -> tuple[str, str]:
        """How the stream ended, by the picker's word."""
        async with asyncio.timeout(LIMIT_S):
            return (await self.call.code()).name, await self.call.details()

    async def say_headers(self, *, path: str = PATH, method: str = "POST", ended: bool = False) -> None:
        """Send the request's headers."""
        context = {}
        if self.subset is not None:
            named = ListValue(values=[Value(string_value=each) for each in self.subset])
            hint = Struct(fields={SUBSET: Value(list_value=named)})
            context = {"metadata_context": {"filter_metadata": {"envoy.lb.subset_hint": hint}}}
        pseudo = {":method": method, ":path": path, ":authority": "x", ":scheme": "http"}
        modes = {"request_body_mode": self.request_mode, "response_body_mode": self.response_mode}
        await self.say(
            request_headers={"headers": fields_of(pseudo | dict(self.headers)), "end_of_stream": ended},
            protocol_config=modes,
            **context,
        )

    async def say_body(self, body: bytes, *, ended: bool = True) -> None:
        """Send the request's body, or a piece of it."""
        await self.say(request_body={"body": body, "end_of_stream": ended})

    async def pick(self, body: bytes | None = None) -> Message:
        """Send the whole first half: headers, body; returns the answer that names the endpoint (or refuses)."""
        body = chat() if body is None else body
        await self.say_headers()
        if self.request_mode == BodyMode.BUFFERED:
            await self.hear()
        await self.say_body(body)
        answer = await self.hear()
        if not answer.HasField("immediate_response"):
            self.chosen = destination(answer)[0]
        return answer

    async def answer(
        self, *, status: int = 200, served: str | None = None, details: str = "", ended: bool = False, **headers: str
    ) -> Message:
        """Send the response's headers, from the chosen endpoint unless given."""
        served = self.chosen if served is None else served
        attributes = {name: Value(string_value=value) for name, value in
                      (("upstream.address", served), ("response.code_details", details)) if value}  # fmt: skip
        about = {":status": str(status), "content-type": "application/json", **headers}
        await self.say(
            response_headers={"headers": fields_of(about), "end_of_stream": ended},
            attributes={"envoy.filters.http.ext_proc": Struct(fields=attributes)},
        )
        return await self.hear()

    async def say_piece(self, piece: bytes, *, ended: bool = False) -> Message:
        """Send a piece of the response's body."""
        await self.say(response_body={"body": piece, "end_of_stream": ended})
        return await self.hear()

    async def finish(self) -> tuple[str, str]:
        """End the request."""
        await self.call.done_writing()
        return await self.status()


def served_metadata(address: str) -> dict[str, Any]:
    """As a gateway tells which endpoint served, in the picker protocol's own way."""
    lb = Struct(fields={SERVED: Value(string_value=address)})
    return {"filter_metadata": {"envoy.lb": lb}}


def fields_of(headers: Mapping[str, str]) -> Message:
    """As Envoy sends them."""
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def destination(answer: Message) -> list[str]:
    """Where the request is to go, after checking that header and metadata say the same."""
    part = answer.request_headers if answer.HasField("request_headers") else answer.request_body
    said = [one.header.raw_value.decode() for one in part.response.header_mutation.set_headers
            if one.header.key == DESTINATION]  # fmt: skip
    metadata = answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
    assert said == [metadata]
    return metadata.split(",")
