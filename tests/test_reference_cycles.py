"""What a request leaves behind: nothing that only the garbage collector can free, since that holds bodies for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from starlette.types import Send

from kvproxy.listener.server import serve
from tests.support.fake_engine import Behaviour, Call, FakeEngine, answer_ok, event, reply, start_stream
from tests.support.proxy import chat, running_proxy

TIMES = 3


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """Whatever is found unreachable and not freed by its count, once collected."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


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


@pytest.mark.parametrize("behaviour", [answer_ok, stream, busy_first], ids=["whole", "streamed", "after a refusal"])
async def test_a_request_leaves_no_cycles(behaviour: Behaviour, garbage: list[object]) -> None:
    """With kv_aware, facts, callbacks and the queue's refresh in place; a cycle would keep a body of megabytes."""
    engine = FakeEngine("a", behaviour)
    async with serve(engine) as url, running_proxy({"a": url, "b": url}, policy="kv_aware", queue={}) as proxy:
        body = chat("word " * 200, stream=behaviour is stream)
        for _ in range(TIMES):
            await proxy.client.post("/v1/chat/completions", json=body)
        gc.collect()
        garbage.clear()
        for _ in range(TIMES):
            answer = await proxy.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
        gc.collect()
        left = [type(one).__qualname__ for one in garbage if type(one).__module__.startswith("kvproxy.")]
    assert left == []
