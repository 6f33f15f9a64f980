"""Remains of a request: nothing that only the garbage collector can free, since that holds bodies for long.

They run in a process of their own (`python -m tests.system.test_reference_cycles`): the collector finds the whole
process's garbage, and here that is one proxy's alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.proxy import chat, running_proxy
from tests.support.scripted import Peer, scripted

TIMES = 3


async def busy_first(engine: FakeEngine, call: Call, send: Send) -> None:
    """Every other answer is a refusal."""
    if len(engine.calls) % 2:
        await reply(send, 503, b'{"error": {"message": "busy"}}')
    else:
        await answer_ok(engine, call, send)


async def stream(engine: FakeEngine, call: Call, send: Send) -> None:
    """Two events."""
    await start_stream(send)
    await event(send, b'data: {"choices": [{"delta": {"content": "a"}}]}')
    await event(send, b"data: [DONE]")
    await send({"type": "http.response.body", "body": b""})


async def stall(engine: FakeEngine, call: Call, send: Send) -> None:
    """One event, and nothing more until the proxy leaves."""
    await start_stream(send)
    await event(send, b'data: {"choices": [{"delta": {"content": "a"}}]}')
    await call.gone.wait()


async def closes(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer, and close the connection."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


async def breaks(peer: Peer) -> None:
    """Half a stream."""
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n")
    peer.reset()


async def falls_silent(peer: Peer) -> None:
    """Nothing but the end."""
    await peer.request()
    peer.reset()


#: Nothing but requests: no readings of the engines' metrics.
FILTERS = [
    "request_id",
    "inference_request",
    {"kvcache": {"engine_metrics_interval": 0, "kv_events": False}},
    "access_log",
    "router",
]

CASES = {"whole": answer_ok, "streamed": stream, "refused": busy_first, "closed": closes, "left": stall}
BROKEN = {"broken": breaks, "silent": falls_silent}


@contextlib.asynccontextmanager
async def engine_of(case: str) -> AsyncIterator[str]:
    """Its URL."""
    if case in BROKEN:
        async with scripted(BROKEN[case]) as upstream:
            yield str(upstream.origin)
    else:
        async with serve(FakeEngine("a", CASES[case])) as url:
            yield url


async def ask(client: httpx.AsyncClient, case: str) -> None:
    """Send a request, and read its answer or leave in the middle."""
    body = chat("word " * 200, stream=case in ("streamed", "left", "broken"))
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == (502 if case == "silent" else 200)
        if case == "left":
            await anext(answer.aiter_raw())
        else:
            await answer.aread()
    await asyncio.sleep(0.05)  # for ends behind the answer: what is found then is left over, whenever one looks


async def leftovers(case: str) -> list[str]:
    """Types of kvproxy's objects that some requests left to the collector."""
    config: dict[str, Any] = {"policy": "kv_aware", "queue": {}, "filters": FILTERS, "shield": "off"}
    async with engine_of(case) as url, running_proxy({"a": url, "b": url}, **config) as proxy:
        for _ in range(TIMES):
            await ask(proxy.client, case)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for _ in range(TIMES):
            await ask(proxy.client, case)
        gc.collect()
        left = [type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("kvproxy.")]
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return left


@pytest.mark.slow
def test_requests_leave_no_cycles() -> None:
    """With kv_aware, facts, callbacks and the queue's refresh in place; a cycle would keep a body of megabytes."""
    command = [sys.executable, "-m", "tests.system.test_reference_cycles"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {case: [] for case in [*CASES, *BROKEN]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({case: asyncio.run(leftovers(case)) for case in [*CASES, *BROKEN]}))
