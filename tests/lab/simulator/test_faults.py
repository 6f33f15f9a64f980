"""Every fault switch, as a router would meet it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.lab.simulator.support import Running, engine, slow, sse_events

BODY = {"messages": [{"role": "user", "content": "Hello world"}], "max_tokens": 6}
STREAM = {**BODY, "stream": True}
PATH = "/v1/chat/completions"


async def lines_of(running: Running, body: dict[str, Any]) -> list[str]:
    """Return data lines received before the stream ended or broke."""
    async with running.client.stream("POST", PATH, json=body) as reply:
        return [line async for line in reply.aiter_lines() if line]


async def test_fail_next_uses_itself_up() -> None:
    """Two failures, then service again."""
    async with engine() as running:
        await running.faults(fail_next=2, fail_status=502)
        assert [(await running.client.post(PATH, json=BODY)).status_code for _ in range(3)] == [502, 502, 200]


async def test_busy_next_is_vllms_503() -> None:
    """The answer made for routers."""
    async with engine() as running:
        await running.faults(busy_next=1)
        reply = await running.client.post(PATH, json=BODY)
    assert reply.status_code == 503
    assert "currently busy" in reply.json()["error"]["message"]


async def test_a_cut_stream_breaks_the_connection() -> None:
    """No terminating chunk: the client sees an incomplete response, not an end."""
    async with engine() as running:
        await running.faults(cut_next=1, cut_after_chunks=1)
        with pytest.raises(httpx.RemoteProtocolError):
            await lines_of(running, STREAM)
        assert (await running.state())["requests"][-1]["outcome"] == "cut"
        assert (await lines_of(running, STREAM))[-1] == "data: [DONE]"


async def test_an_error_in_the_stream_ends_it_properly() -> None:
    """As when the engine process dies: an error event, [DONE], status 200."""
    async with engine() as running:
        await running.faults(error_next=1, error_after_chunks=1)
        reply = await running.client.post(PATH, json=STREAM)
    events = sse_events(reply.text)
    assert reply.status_code == 200
    assert events[-2]["error"]["type"] == "InternalServerError"
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_end_with_an_error_event_too(path: str) -> None:
    """Each in its own words."""
    async with engine() as running:
        await running.faults(error_next=1)
        body = {"input": "Hello", "messages": BODY["messages"], "max_tokens": 6, "stream": True}
        reply = await running.client.post(path, json=body)
    assert "EngineCore encountered an issue" in reply.text


async def test_a_dead_engine() -> None:
    """/health 503 while /v1/models still answers; running streams end with the error, new requests with 500."""
    async with engine(engine=slow(prefill_step_s=30.0)) as running:
        async with running.client.stream("POST", PATH, json=STREAM) as reply:
            await running.faults(engine_dead=True)
            assert "EngineCore" in (await reply.aread()).decode()
        assert (await running.client.get("/health")).status_code == 503
        assert (await running.client.get("/v1/models")).status_code == 200
        assert (await running.client.post(PATH, json=BODY)).status_code == 500
        await running.faults(reset=True)
        assert (await running.client.get("/health")).status_code == 200


async def test_an_engine_that_dies_under_a_whole_answer() -> None:
    """500 in vLLM's shape."""
    async with engine(engine=slow(prefill_step_s=30.0)) as running:
        whole = asyncio.create_task(running.client.post(PATH, json=BODY))
        while (await running.state())["running"] < 1:
            continue
        await running.faults(engine_dead=True)
        assert (await whole).status_code == 500
        assert (await running.state())["requests"][0]["outcome"] == "error"


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_stalled_head_waits_for_the_switch(body: dict[str, Any]) -> None:
    """No response head until the fault is lifted."""
    async with engine() as running:
        await running.faults(stall_head_s=1000.0)
        task = asyncio.create_task(running.client.post(PATH, json=body))
        while not (await running.state())["requests"]:
            continue
        assert not task.done()
        await running.faults(reset=True)
        assert (await task).status_code == 200


async def test_a_stall_before_the_first_byte() -> None:
    """The head is there, the data is not."""
    async with engine() as running:
        await running.faults(stall_first_byte_s=1000.0)
        async with running.client.stream("POST", PATH, json=STREAM) as reply:
            assert reply.status_code == 200
            await running.faults(reset=True)
            assert (await reply.aread()).endswith(b"[DONE]\n\n")


async def test_a_stall_in_mid_stream() -> None:
    """One chunk, then silence until the switch."""
    async with engine() as running:
        await running.faults(stall_mid_stream_s=1000.0, stall_mid_stream_after_chunks=1)
        async with running.client.stream("POST", PATH, json=STREAM) as reply:
            chunks = reply.aiter_text()
            first = await anext(chunks)
            assert '"role":"assistant"' in first
            await running.faults(reset=True)
            rest = "".join([chunk async for chunk in chunks])
    assert rest.endswith("[DONE]\n\n")


async def test_a_stall_ends_by_itself() -> None:
    """Seconds are a bound, not for ever."""
    async with engine() as running:
        await running.faults(stall_head_s=0.001)
        assert (await running.client.post(PATH, json=BODY)).status_code == 200


async def test_tokenize_slow_or_missing() -> None:
    """An engine behind a gateway that hides /tokenize, and one that takes its time."""
    async with engine() as running:
        await running.faults(no_tokenize=True)
        assert (await running.client.post("/tokenize", json={"prompt": "a"})).status_code == 404
        await running.faults(reset=True, slow_tokenize_s=1000.0)
        task = asyncio.create_task(running.client.post("/tokenize", json={"prompt": "a"}))
        while (await running.state())["calls"]["POST /tokenize"] < 2:
            continue
        assert not task.done()
        await running.faults(reset=True)
        assert (await task).status_code == 200
