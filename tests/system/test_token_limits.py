"""A token limit holds for every body an engine may read, and whatever its answer says."""

from __future__ import annotations

import json

import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Behaviour, Call, FakeEngine, event, reply, start_stream
from tests.support.proxy import running_proxy

PLAIN = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 40}]}).encode()
CHAT = "/v1/chat/completions"
FILTERS = [{"rate_limit": {"tokens_per_minute": 20}}, "inference_request", "router"]


async def streams_without_usage(engine: FakeEngine, call: Call, send: Send) -> None:
    """Eight events and the end."""
    await start_stream(send)
    for number in range(8):
        await event(send, b"%d" % number)
    await event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b""})


async def streams_usage(engine: FakeEngine, call: Call, send: Send) -> None:
    """Two events, of which the second says it all."""
    await start_stream(send)
    await event(send, b"1")
    await event(send, b'{"usage":{"prompt_tokens":10,"completion_tokens":2}}')
    await send({"type": "http.response.body", "body": b""})


async def tells_nothing(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer shortly without usage."""
    await reply(send, 200, b'{"results":[]}')


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT, PLAIN, {}),
        (CHAT, PLAIN[:-1] + b',"temperature":NaN}', {}),
        (CHAT, PLAIN[:-1] + b',"session_id":{}}', {}),
        (CHAT, PLAIN[:-1] + b',"user":"\\ud800"}', {}),
        (CHAT, PLAIN.decode().encode("utf-16"), {}),
        (CHAT, b"\xef\xbb\xbf" + PLAIN, {}),
        (CHAT, PLAIN, {"content-encoding": "x"}),
        ("/v1/rerank", PLAIN, {}),
    ],
    ids=["plain", "NaN", "session", "surrogate", "utf-16", "mark", "encoded", "another path"],
)
async def test_usage_is_charged_whatever_the_body_looked_like(path: str, body: bytes, headers: dict[str, str]) -> None:
    """Twelve tokens a request of twenty a minute: the third one waits."""
    engine = FakeEngine("e1")
    async with serve(engine) as url, running_proxy({"e1": url}, filters=FILTERS) as proxy:
        headers = {"content-type": "application/json", **headers}
        answers = [await proxy.client.post(path, content=body, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


@pytest.mark.parametrize("behave", [streams_without_usage, streams_usage, tells_nothing])
@pytest.mark.parametrize("body", [PLAIN, PLAIN.decode().encode("utf-16")], ids=["understood", "not understood"])
async def test_an_answer_without_usage_is_charged_by_bytes_and_events(behave: Behaviour, body: bytes) -> None:
    """A quarter of a token a byte, and one an event."""
    engine = FakeEngine("e1", behave)
    async with serve(engine) as url, running_proxy({"e1": url}, filters=FILTERS) as proxy:
        answers = [await proxy.client.post(CHAT, content=body) for _ in range(3)]
    assert [answer.status_code for answer in answers][-1] == 429


FORGED = b'{"usage":{"input_tokens":0,"output_tokens":0,"prompt_tokens":0,"completion_tokens":0}}'


async def queues(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer as the responses API to `background: true`: no usage yet, and the tools as they were sent."""
    tools = json.dumps(json.loads(call.body)["tools"]).encode()
    await reply(send, 200, b'{"status":"queued","usage":null,"tools":' + tools + b"}")


async def test_a_tool_that_looks_like_usage_is_not_taken_for_it() -> None:
    """Its request is charged by its bytes, as any without usage."""
    engine = FakeEngine("e1", queues)
    body = b'{"model":"m","input":"hello","background":true,"tools":[{"parameters":' + FORGED + b"}]}"
    async with serve(engine) as url, running_proxy({"e1": url}, filters=FILTERS) as proxy:
        answers = [await proxy.client.post("/v1/responses", content=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


INFO = b'{"id":"a","finish_reason":{"type":"stop"},"prompt_tokens":5000,"completion_tokens":%d,"cached_tokens":4}'


async def answers_as_sglang(engine: FakeEngine, call: Call, send: Send) -> None:
    """Its own API."""
    await reply(send, 200, b'{"text":"x","output_ids":[1],"meta_info":' + INFO % 4 + b"}")


async def streams_as_sglang(engine: FakeEngine, call: Call, send: Send) -> None:
    """All so far in each event, with the counts."""
    await start_stream(send)
    for number in range(1, 5):
        text = b"x" * 6000 * number
        await event(send, b'{"text":"' + text + b'","output_ids":[1],"meta_info":' + INFO % number + b"}")
    await event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("behave", [answers_as_sglang, streams_as_sglang])
async def test_sglang_s_own_counts_are_charged(behave: Behaviour) -> None:
    """Five thousand tokens of one thousand: the second one waits, which an estimate would let in."""
    engine = FakeEngine("e1", behave)
    filters = [{"rate_limit": {"tokens_per_minute": 1000}}, "inference_request", "router"]
    body = b'{"text":"x"}'
    async with serve(engine) as url, running_proxy({"e1": url}, filters=filters) as proxy:
        answers = [await proxy.client.post("/generate", content=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
