"""Remains of a request: nothing that only the garbage collector can free, since that holds bodies for long.

They run in a process of their own (`python -m tests.system.test_reference_cycles`): the collector finds the whole
process's garbage, and here that is one proxy's alone."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.proxy import chat, running_proxy

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


#: Nothing but requests: no readings of the engines' metrics.
FILTERS = [
    "request_id",
    "inference_request",
    {"kvcache": {"engine_metrics_interval": 0, "kv_events": False}},
    "access_log",
    "router",
]

CASES = {"whole": answer_ok, "streamed": stream, "refused": busy_first, "closed": closes, "left": stall}


async def ask(client: httpx.AsyncClient, body: dict[str, Any], engine: FakeEngine, *, leaves: bool) -> None:
    """Send a request, and read its answer or leave in the middle."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        if leaves:
            await anext(answer.aiter_raw())
        else:
            await answer.aread()
    if leaves:
        await engine.calls[-1].gone.wait()
        await asyncio.sleep(0.05)  # what is left is counted, and no wait makes it less


async def leftovers(case: str) -> list[str]:
    """Types of kvproxy's objects that some requests left to the collector."""
    engine = FakeEngine("a", CASES[case])
    config: dict[str, Any] = {"policy": "kv_aware", "queue": {}, "filters": FILTERS, "shield": "off"}
    async with serve(engine) as url, running_proxy({"a": url, "b": url}, **config) as proxy:
        body = chat("word " * 200, stream=case in ("streamed", "left"))
        for _ in range(TIMES):
            await ask(proxy.client, body, engine, leaves=case == "left")
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        for _ in range(TIMES):
            await ask(proxy.client, body, engine, leaves=case == "left")
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
    assert json.loads(ended.stdout) == {case: [] for case in CASES}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({case: asyncio.run(leftovers(case)) for case in CASES}))
