"""A stand-in engine that costs as little as Python can: a raw protocol on uvloop, no parsing beyond what it needs.

`python -m benchmarks.stub PORT...`: as many engines in one process. A body with `"stream":true` gets 64 events, all at
once, or 20 ms apart when it has `paced`; `/v1/chat/completions/render` (vllm-router's cache_aware calls it for every
prompt) the prompt's tokens, as vLLM's with `--enable-scale-out`; every other POST a short completion; GET the paths
that routers read at start."""

from __future__ import annotations

import asyncio
import re
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import uvloop

EVENTS = 64
PACE_S = 0.02
_EVENT = (
    b'data: {"id":"cmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" tok"}}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_COMPLETION = (
    b'{"id":"cmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":500,"completion_tokens":1,"total_tokens":501}}'
)
_INFO = (
    b'{"object":"list","status":"ok","model_path":"bench","data":[{"id":"bench","object":"model","created":1,'
    b'"owned_by":"bench","max_model_len":131072}]}'
)
_STREAMING = re.compile(rb'"stream": ?true')
_RENDER = re.compile(rb"POST /v1/(chat/)?completions/render[? ]")
_TOKEN_BYTES, _VOCABULARY = 4, 150_000
_CHUNKED = re.compile(rb"transfer-encoding: *chunked", re.IGNORECASE)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=64)
def rendered(body: bytes, *, chat: bool) -> bytes:
    """Return vLLM 0.32's answer to `/render` (captured from one), with four bytes a token: prompts that differ have
    other tokens from there on. A load sends one body again and again; tokenizing it once is enough."""
    count = len(body) // _TOKEN_BYTES
    ids = b",".join(b"%d" % (each % _VOCABULARY) for each in struct.unpack_from(f"<{count}I", body))
    kind = b"chatcmpl" if chat else b"cmpl"
    one = (
        b'{"request_id":"%b-8f4f1e8de97a6944","token_ids":[%b],"token_offsets":null,"features":null,"content_parts":null,'
        b'"sampling_params":{"presence_penalty":0.0,"frequency_penalty":0.0,"repetition_penalty":1.0,"temperature":1.0,'
        b'"top_p":1.0,"min_p":0.0,"stop":[],"stop_token_ids":[],"max_tokens":4,"output_kind":2,"skip_clone":true,'
        b'"bad_words":[],"skip_reading_prefix_cache":false},"model":"bench","reasoning_ended":null,'
        b'"reasoning_parser_kwargs":null,"return_token_ids":null,"output_mode":"tokens","stream":false,'
        b'"stream_options":null,"cache_salt":null,"priority":0,"kv_transfer_params":null,"ec_transfer_params":null}'
    ) % (kind, ids)
    return _plain(one if chat else b"[%b]" % one)


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_EVENT = _chunk(_EVENT)
_STREAM_END = _chunk(_DONE) + b"0\r\n\r\n"
_BURST = _STREAM_HEAD + _STREAM_EVENT * (EVENTS - 1) + _STREAM_END
_ANSWER = _plain(_COMPLETION)
_ABOUT = _plain(_INFO)


def _size(data: bytes, end: int) -> int:
    """Bytes of the request whose head ends there; 0: not known yet. (Envoy streams in chunks.)"""
    if length := _LENGTH.search(data, 0, end):
        return end + 4 + int(length[1])
    if not _CHUNKED.search(data, 0, end):
        return end + 4
    last = data.find(b"\r\n0\r\n\r\n", end)
    return 0 if last < 0 else last + 7


class Engine(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._data = b""
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._data = data = self._data + data if self._data else data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            size = _size(data, end)
            if not size or len(data) < size:
                break
            self._answer(data[:size])
            data = data[size:]
        self._data = data

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST"):
            self._transport.write(_ABOUT)
        elif render := _RENDER.match(request):
            self._transport.write(rendered(request[request.find(b"\r\n\r\n") + 4 :], chat=bool(render[1])))
        elif not _STREAMING.search(request):
            self._transport.write(_ANSWER)
        elif b"paced" in request:
            self._transport.write(_STREAM_HEAD)
            self._pace(EVENTS)
        else:
            self._transport.write(_BURST)

    def _pace(self, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_STREAM_EVENT if left > 1 else _STREAM_END)
        if left > 1:
            self._loop.call_later(PACE_S, self._pace, left - 1)


async def main(ports: Sequence[int]) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
