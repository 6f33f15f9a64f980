"""Fields that an engine leaves out of its usage are put there in the client's words, if the operator wants that;
nothing else of an answer changes."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import InferenceRequest, Prompt, RequestKind
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.features.ledger.cached_counts import CachedCounts, write_cached
from kvproxy.operate.config.load import check_config
from kvproxy.proxy.forward.relay import MAX_HELD_BYTES
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.usage import read_usage
from tests.support.fake_engine import Call, FakeEngine, reply, start_stream
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, chat, running_proxy

CHAT, COMPLETION, RESPONSES, MESSAGES = (
    RequestKind.CHAT,
    RequestKind.COMPLETION,
    RequestKind.RESPONSES,
    RequestKind.MESSAGES,
)
SSE = b"text/event-stream"


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b'{"prompt_tokens": 9,"completion_tokens":1}', {"cached_tokens": 5}),
        (b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":null}', {"cached_tokens": 5}),
        (
            b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":null}}',
            {"audio_tokens": 0, "cached_tokens": 5},
        ),
        (
            b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}',
            {"cached_tokens": 0},
        ),
    ],
)
def test_chats_and_completions_say_it_in_the_details(kind: RequestKind, usage: bytes, expected: dict[str, int]) -> None:
    """A count that the engine gave, also one of 0, is never changed, nor is any byte outside of the usage."""
    before, behind = (
        b'{"id" :"x","choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}],  "usage":',
        b' , "k": 1.50}\n',
    )
    written = write_cached(before + usage + behind, kind, prompt=9, cached=5)
    assert written.startswith(before)
    assert written.endswith(behind)
    found = json.loads(written)["usage"]
    assert (found["prompt_tokens"], found["completion_tokens"], found["prompt_tokens_details"]) == (9, 1, expected)


def test_responses_say_it_in_the_details_also_in_their_last_event() -> None:
    whole = b'{"id":"r","usage":{"input_tokens":9,"output_tokens":2},"user":"u"}'
    assert json.loads(write_cached(whole, RESPONSES, prompt=9, cached=5))["usage"]["input_tokens_details"] == {
        "cached_tokens": 5
    }
    event = b'event: response.completed\ndata: {"type":"response.completed","response":%s}\n\n' % whole
    written = write_cached(event, RESPONSES, prompt=9, cached=5)
    data = json.loads(written.partition(b"data: ")[2])
    assert data["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 5}
    assert written.endswith(b'"user":"u"}}\n\n')


def test_messages_count_the_input_without_what_was_cached() -> None:
    """As that API does: the three counts together are the prompt."""
    whole = b'{"usage":{"input_tokens":100,"output_tokens":2,"cache_creation_input_tokens":16}}'
    usage = read_usage(whole)
    assert usage is not None
    assert usage.prompt_tokens == 116
    written = json.loads(write_cached(whole, MESSAGES, prompt=116, cached=64))["usage"]
    assert (written["input_tokens"], written["cache_read_input_tokens"]) == (36, 64)
    same = b'{"usage":{"input_tokens":100,"output_tokens":2,"cache_read_input_tokens":0}}'
    assert write_cached(same, MESSAGES, prompt=100, cached=64) is same


@pytest.mark.parametrize("kind", [CHAT, COMPLETION, RESPONSES, MESSAGES])
@given(answer=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: b'{"usage":' + text.encode() + b"}"))
def test_bodies_without_an_answer_are_left_as_they_are(kind: RequestKind, answer: bytes) -> None:
    if read_usage(answer) is None:
        assert write_cached(answer, kind, prompt=9, cached=5) == answer


@pytest.mark.parametrize("odd", [b'"x":1e999', b'"x":"\xff"', b'"\xff":1'])
def test_counts_beside_what_cannot_be_read_stay_as_they_are(odd: bytes) -> None:
    """The counts are read over it; to be written again, all of them would have to be."""
    usage = b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":null,' + odd + b"}}"
    answer = b'{"choices":[],"usage":' + usage + b"}"
    assert read_usage(answer) is not None
    assert write_cached(answer, CHAT, prompt=9, cached=5) is answer


def completed(kind: RequestKind) -> list[bytes]:
    """Return the events of a stream of this API, as an engine sends them that reports cached tokens in a format of its
    own."""
    usage = b'"usage":{"prompt_tokens":100,"completion_tokens":7},"timings":{"cache_n":64}'
    if kind is MESSAGES:
        start = b'{"type":"message_start","message":{"usage":{"input_tokens":100,"cached_tokens":64}}}'
        return [
            b"event: message_start\ndata: " + start + b"\n\n",
            b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"\\"usage\\""}}\n\n',
            b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":7}}\n\n',
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        ]
    if kind is RESPONSES:
        usage = b'"usage":{"input_tokens":100,"output_tokens":7,"cached_tokens":64}'
        return [
            b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1","usage":null}}\n\n',
            b'event: response.completed\ndata: {"type":"response.completed","response":{%s}}\n\n' % usage,
        ]
    return [
        b'data: {"choices":[{"delta":{"content":"usage"},"finish_reason":null}],"usage":null}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}\n\n',
        b'data: {"choices":[],%s}\n\n' % usage,
        b"data: [DONE]\n\n",
    ]


PATHS = {
    CHAT: "/v1/chat/completions",
    COMPLETION: "/v1/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}


def body_of(kind: RequestKind, *, stream: bool = False, text: str = "hello") -> dict[str, Any]:
    """Return a request of this API."""
    if kind is CHAT or kind is MESSAGES:
        return chat(text, stream=stream)
    return {"model": "m", "prompt" if kind is COMPLETION else "input": text, "stream": stream}


def said(kind: RequestKind, stream: bytes) -> tuple[int | None, int | None]:
    """Return the counts that a client of this API reads: the prompt's tokens, and the cached ones."""
    usage = read_usage(stream, stream if kind is MESSAGES else b"")
    assert usage is not None
    last = stream[stream.rindex(b'"usage":{') :]
    names = {MESSAGES: b'"cache_read_input_tokens":', RESPONSES: b'"input_tokens_details":{"cached_tokens":'}
    name = names.get(kind, b'"prompt_tokens_details":{"cached_tokens":')
    found = last.partition(name)[2]
    return usage.prompt_tokens, int(
        found[: min(map(found.find, [b",", b"}"]), key=lambda at: at % 1000)]
    ) if found else None


def streams(*pieces: bytes, content_type: bytes = SSE) -> Callable[[FakeEngine, Call, Send], Any]:
    """Return an engine that sends these pieces."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    return behave


def router(mode: str) -> list[Any]:
    """Return a chain whose router writes counts of this kind."""
    return ["inference_request", "kvcache", {"router": {"cached_tokens": mode}}]


async def ask(proxy: RunningProxy, kind: RequestKind, **fields: Any) -> bytes:
    """Send a client's request."""
    answer = await proxy.client.post(PATHS[kind], json=body_of(kind, **fields))
    assert answer.status_code == 200
    return answer.content


@pytest.mark.parametrize("kind", [CHAT, COMPLETION, RESPONSES, MESSAGES])
@pytest.mark.parametrize("cut", [None, 1, 7, 50])
async def test_a_stream_says_it_in_its_last_usage(kind: RequestKind, cut: int | None) -> None:
    """However the network cuts it; all other events are as they came."""
    events = completed(kind)
    whole = b"".join(events)
    pieces = events if cut is None else [whole[i : i + cut] for i in range(0, len(whole), cut)]
    async with (
        serve(FakeEngine("a", streams(*pieces))) as url,
        running_proxy({"a": url}, filters=router("engine")) as proxy,
    ):
        got = await ask(proxy, kind, stream=True)
        assert said(kind, got) == (100, 64)
        changed = [one for one in got.split(b"\n\n") if one + b"\n\n" not in events and one]
        assert len(changed) == 1
        assert proxy.metric("kvproxy_cached_counts_written_total", source="engine") == 1


@pytest.mark.parametrize("kind", [CHAT, MESSAGES])
async def test_a_stream_that_comes_at_once_is_told_too(kind: RequestKind) -> None:
    async with (
        serve(FakeEngine("a", streams(b"".join(completed(kind))))) as url,
        running_proxy({"a": url}, filters=router("engine")) as proxy,
    ):
        assert said(kind, await ask(proxy, kind, stream=True)) == (100, 64)


async def test_a_stream_without_usage_stays_as_it_is() -> None:
    events = [b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', b": ping\n\n", b"data: [DONE]\n\n"]
    async with (
        serve(FakeEngine("a", streams(*events))) as url,
        running_proxy({"a": url}, filters=router("predicted")) as proxy,
    ):
        assert await ask(proxy, CHAT, stream=True) == b"".join(events)


async def test_a_stream_that_breaks_in_an_event_ends_as_any_other() -> None:
    """With what was whole, and an error event."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await send({"type": "http.response.body", "body": b"data: 1\n\ndata: {", "more_body": True})
        raise ConnectionResetError

    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy({"a": url}, filters=router("engine"), retry={"attempts": 1}) as proxy,
    ):
        got = await ask(proxy, CHAT, stream=True)
        assert got.startswith(b"data: 1\n\n")
        assert b"data: {\n" not in got
        assert b'"error"' in got


BESIDE = b'{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":7},"timings":{"cache_n":64}}'


@pytest.mark.parametrize(
    "rest",
    [
        b'"timings":{"cache_n":64}',
        b'"sglext":{"cached_tokens_details":{"device":32,"host":32,"storage":0,"storage_backend":"x"}}',
        b'"meta_info":{"prompt_tokens":100,"cached_tokens":64}',
    ],
)
async def test_cached_counts_outside_the_usage_are_put_there(rest: bytes) -> None:
    """llama.cpp, and SGLang by its two ways; the head says the new length."""
    body = (
        b'{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":null},' + rest + b"}"
    )

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, body)

    async with serve(FakeEngine("a", behave)) as url, running_proxy({"a": url}, filters=router("engine")) as proxy:
        assert json.loads(await ask(proxy, CHAT))["usage"] == {
            "prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64},
        }  # fmt: skip
    async with serve(FakeEngine("a", behave)) as url, running_proxy({"a": url}) as proxy:
        assert await ask(proxy, CHAT) == body


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (gzip.compress(BESIDE), [(b"content-encoding", b"gzip"), (b"content-type", b"application/json")]),
        (BESIDE, [(b"content-type", b"text/plain")]),
        (BESIDE[:-1], [(b"content-type", b"application/json")]),
        (
            b'{"choices":[],"usage":{"prompt_tokens":"100"},"timings":{"cache_n":64}}',
            [(b"content-type", b"application/json")],
        ),
        (b'{"pad":"%b",' % (b"x" * MAX_HELD_BYTES) + BESIDE[1:], [(b"content-type", b"application/json")]),
    ],
    ids=["compressed", "no json", "cut", "no counts", "long"],
)
async def test_odd_answers_stay_as_they_are(body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        for at in range(0, len(body), 200_000):
            await send({"type": "http.response.body", "body": body[at : at + 200_000], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serve(FakeEngine("a", behave)) as url, running_proxy({"a": url}, filters=router("predicted")) as proxy:
        got = await ask(proxy, CHAT)
        assert got == (gzip.decompress(body) if headers[0][1] == b"gzip" else body)
        assert proxy.metric("kvproxy_cached_counts_written_total", source="engine") == 0


async def test_an_answer_that_breaks_off_while_it_is_held_is_cut_for_its_client_too() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BESIDE))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": BESIDE[:40], "more_body": True})
        raise ConnectionResetError

    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy({"a": url}, filters=router("engine"), retry={"attempts": 1}) as proxy,
    ):
        with pytest.raises(Exception, match=r"(?i)peer closed|incomplete"):
            await ask(proxy, CHAT)


SILENT = b'{"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":7}}'


async def silent(engine: FakeEngine, call: Call, send: Send) -> None:
    """Says nothing of what it had cached."""
    await reply(send, 200, SILENT)


async def test_a_prediction_is_told_only_if_the_operator_says_so() -> None:
    """Of a prompt that was sent before nearly all is believed to be cached, in the engine's own tokens."""
    prompt = "A sentence that is said once more. " * 200
    async with serve(FakeEngine("a", silent)) as url:
        async with running_proxy({"a": url}, filters=router("engine")) as proxy:
            for _ in range(2):
                assert await ask(proxy, CHAT, text=prompt) == SILENT
        async with running_proxy({"a": url}, filters=router("predicted")) as proxy:
            first, second = [json.loads(await ask(proxy, CHAT, text=prompt))["usage"] for _ in range(2)]
            assert first["prompt_tokens_details"] == {"cached_tokens": 0}
            assert 800 < second["prompt_tokens_details"]["cached_tokens"] < 1000
            assert proxy.metric("kvproxy_cached_counts_written_total", source="predicted") == 2
            assert proxy.metric("kvproxy_cached_tokens_total", cluster="default") == 0


@pytest.mark.parametrize("before", [[], [{"kvcache": {"enabled": False}}]], ids=["absent", "switched off"])
def test_predictions_need_the_filter_that_makes_them(before: list[Any]) -> None:
    """Refused with the place of the setting."""
    filters = ["inference_request", *before, {"router": {"cached_tokens": "predicted"}}]
    config, [problem] = check_config({"endpoints": ["http://127.0.0.1:9"], "policy": "random", "filters": filters})
    assert config is None
    assert problem.path == f"filters[{1 + len(before)}].router.cached_tokens"


async def test_a_prediction_never_replaces_a_count() -> None:
    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, SILENT[:-2] + b',"prompt_tokens_details":{"cached_tokens":0}}}')

    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy({"a": url}, filters=router("predicted")) as proxy,
    ):
        for _ in range(2):
            usage = json.loads(await ask(proxy, CHAT, text="Once more. " * 200))["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert proxy.metric("kvproxy_cached_counts_written_total", source="predicted") == 0


async def test_an_event_beyond_the_bound_is_held_no_longer() -> None:
    """From then on the stream goes as it comes."""
    exchange = Exchange(received_at=0.0, inference=InferenceRequest(CHAT, "m", Prompt(b"", (b"x",))))
    response = UpstreamResponse(None, asyncio.get_running_loop())
    response.status, response.headers = 200, [(b"content-type", SSE)]
    count = CachedCounts(predicted=True, metrics=Metrics()).follow(exchange, response)
    assert count is not None
    start = b"data: " + b"x" * (MAX_HELD_BYTES - 6)
    assert count.next_piece(start) == b""
    assert count.next_piece(b"yz") == start + b"yz"
    assert count.next_piece(b"half") == b"half"
    assert count.finish(b"") == b""
