"""A stand-in engine that costs as little as Python can: a raw protocol on uvloop, no parsing beyond what it needs.

`python -m benchmarks.stub PORT...`: as many engines in one process. A body with `"stream":true` gets 64 events, all at
once, or 20 ms apart when it says `paced`; every other POST a short completion; GET what routers ask at start.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
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
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_EVENT = _chunk(_EVENT)
_STREAM_END = _chunk(_DONE) + b"0\r\n\r\n"
_BURST = _STREAM_HEAD + _STREAM_EVENT * (EVENTS - 1) + _STREAM_END
_ANSWER = _plain(_COMPLETION)
_ABOUT = _plain(_INFO)


class Engine(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._data = b""
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._data = data = self._data + data if self._data else data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(data, 0, end)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(data) < size:
                break
            self._answer(data[:size])
            data = data[size:]
        self._data = data

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST"):
            self._transport.write(_ABOUT)
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
    """Serves until killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", port, backlog=4096) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
