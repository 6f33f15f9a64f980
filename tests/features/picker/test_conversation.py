"""Answers to Envoy, message by message: destinations, refusals, and messages that may not come when they do."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from kvproxy.features.picker.messages import (
    DESTINATION,
    FORGEABLE,
    BodyMode,
    Message,
    ProcessingResponse,
    request_pieces,
    response_piece,
)
from kvproxy.operate.placing.carried import CarriedRequest
from kvproxy.proxy.request.exchange import Exchange
from tests.features.picker.support import A, B, C, chat, destination, running_picker
from tests.support.until import until

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED


def refusal(answer: Message) -> tuple[int, str, str]:
    """Status, reason and `retry-after` of an answer in place of an endpoint."""
    reply = answer.immediate_response
    headers = {one.header.key: one.header.raw_value.decode() for one in reply.headers.set_headers}
    assert headers["content-type"] == "application/json"
    return reply.status.code, json.loads(reply.body)["error"]["code"], headers.get("retry-after", "")


async def test_a_buffered_body_is_placed_when_it_is_whole() -> None:
    """Header and metadata name the same endpoints, the chosen one first; its load counts it until it is over."""
    async with running_picker() as picker:
        envoy = picker.ask()
        first = destination(await envoy.pick())
        assert len(first) == 2
        assert set(first) < {A, B, C}
        assert sum(picker.in_flight().values()) == 1
        await envoy.answer(ended=True)
        assert await envoy.finish() == ("OK", "")
        assert sum(picker.in_flight().values()) == 0
        again = picker.ask()
        assert destination(await again.pick())[0] == first[0]  # it holds the prompt


async def test_a_duplex_body_is_held_and_sent_on_behind_the_headers() -> None:
    """Envoy passes on what it is given: every byte, in pieces it takes, the last one marked."""
    async with running_picker() as picker:
        envoy, body = picker.ask(request_mode=DUPLEX), chat("x" * 200_000)
        await envoy.say_headers()
        for start in range(0, len(body), 70_000):
            await envoy.say_body(body[start : start + 70_000], ended=False)
        await envoy.say_body(b"")
        assert len(destination(await envoy.hear())) == 2
        received, ended = b"", False
        while not ended:
            streamed = (await envoy.hear()).request_body.response.body_mutation.streamed_response
            assert len(streamed.body) <= 64 * 1024
            received, ended = received + streamed.body, streamed.end_of_stream
        assert received == body


@pytest.mark.parametrize("size", [0, 1, 110, 127, 128, 16_370, 16_384, 62 * 1024, 62 * 1024 + 1, 200_000])
@pytest.mark.parametrize("ended", [True, False])
def test_a_streamed_body_is_said_as_its_message_class_says_it(size: int, ended: bool) -> None:
    """Lengths of all widths; a body of nothing is only its end."""
    body = b"x" * size
    said = [ProcessingResponse.FromString(head + piece) for head, piece in request_pieces(body, ended=ended)]
    streamed = [one.request_body.response.body_mutation.streamed_response for one in said]
    assert b"".join(one.body for one in streamed) == body
    assert [one.end_of_stream for one in streamed] == [False] * (len(said) - 1) + [ended] * (size > 0 or ended)
    answer = ProcessingResponse()
    expected = answer.response_body.response.body_mutation.streamed_response
    expected.body, expected.end_of_stream = body, ended
    assert ProcessingResponse.FromString(response_piece(body, ended=ended) + body) == answer


async def test_trailers_end_a_duplex_body() -> None:
    """Then no piece of the body is the last, and the trailers follow."""
    async with running_picker() as picker:
        envoy = picker.ask(request_mode=DUPLEX)
        await envoy.say_headers()
        await envoy.say_body(chat(), ended=False)
        await envoy.say(request_trailers={})
        destination(await envoy.hear())
        assert not (await envoy.hear()).request_body.response.body_mutation.streamed_response.end_of_stream
        assert (await envoy.hear()).HasField("request_trailers")


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
async def test_a_body_that_is_not_waited_for_is_not_looked_at(mode: int) -> None:
    """The headers are answered with an endpoint at once, and what follows passes."""
    async with running_picker(policy="round_robin") as picker:
        envoy = picker.ask(request_mode=mode)
        await envoy.say_headers()
        assert destination(await envoy.hear())[0] in (A, B, C)
        if mode == BodyMode.STREAMED:
            await envoy.say_body(b"{")
            assert (await envoy.hear()).HasField("request_body")


async def test_a_request_without_a_body_goes_somewhere() -> None:
    """A GET, as of the list of models."""
    async with running_picker() as picker:
        envoy = picker.ask(request_mode=DUPLEX)
        await envoy.say_headers(path="/v1/models?x=1", method="GET", ended=True)
        assert destination(await envoy.hear())[0] in (A, B, C)


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b'{"model": "m"', b"\xff" * 1000, b"[" * 5000])
@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, DUPLEX])
async def test_a_body_that_is_no_request_goes_somewhere(body: bytes, mode: int) -> None:
    """The engine's own error is what the client should see."""
    async with running_picker() as picker:
        envoy = picker.ask(request_mode=mode)
        assert destination(await envoy.pick(body))[0] in (A, B, C)


async def test_forged_fields_are_cut() -> None:
    """In buffered mode with the first answer already, so that it is gone even if nothing comes after it."""
    forged = dict.fromkeys(FORGEABLE, "127.0.0.1:1")
    async with running_picker() as picker:
        envoy = picker.ask(headers=forged)
        await envoy.say_headers()
        first = (await envoy.hear()).request_headers.response.header_mutation
        assert set(first.remove_headers) == set(FORGEABLE)
        await envoy.say_body(chat())
        assert "127.0.0.1:1" not in destination(await envoy.hear())
        duplex = picker.ask(headers=forged, request_mode=DUPLEX)
        answer = await duplex.pick()
        mutation = answer.request_headers.response.header_mutation
        assert {*mutation.remove_headers, DESTINATION} == set(FORGEABLE)
        assert all(one.append_action == 2 for one in mutation.set_headers)  # in place of the client's
        assert "127.0.0.1:1" not in destination(answer)


async def test_only_the_subset_may_be_picked() -> None:
    """The chosen endpoint and those after it; an address without a port means any."""
    async with running_picker(picker={"fallbacks": 8}) as picker:
        for named, expected in (([B], {B}), ([A, C], {A, C}), (["127.0.0.1"], {A, B, C})):
            assert set(destination(await picker.ask(subset=named).pick())) == expected


@pytest.mark.parametrize("named", [[], ["10.0.0.1:8000"]])
@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, DUPLEX])
async def test_a_subset_without_a_member_is_refused(named: list[str], mode: int) -> None:
    """503, as the protocol says, in the shape of the client's API."""
    async with running_picker() as picker:
        answer = await picker.ask(subset=named, request_mode=mode).pick()
        assert refusal(answer) == (503, "subset", "1")
        assert sum(picker.in_flight().values()) == 0
        assert picker.metric("kvproxy_local_replies_total", status="503", reason="subset") == 1


async def test_further_endpoints_stand_in_the_order_of_the_same_decision() -> None:
    """Each is where the request would go without those before it."""
    async with running_picker(picker={"fallbacks": 2}) as picker:
        busy = [picker.ask(subset=[address]) for address in (B, B, C)]
        for number, envoy in enumerate(busy):
            await envoy.pick(chat(f"{number} " * 2000))
        assert destination(await picker.ask().pick(chat("short"))) == [A, C, B]


async def test_a_rank_is_named_and_falls_back_to_none_of_another_number() -> None:
    """The header that leads to it is set; on another engine it would mean another rank."""
    ranked = {"id": "a", "url": f"http://{A}", "data_parallel": {"ranks": [0, 1]}}
    endpoints: Any = [ranked, {"id": "b", "url": f"http://{B}"}]
    async with running_picker(endpoints=endpoints, picker={"fallbacks": 4}) as picker:
        answer = await picker.ask(subset=[A]).pick()
        headers = {one.header.key: one.header.raw_value.decode()
                   for one in answer.request_body.response.header_mutation.set_headers}  # fmt: skip
        assert destination(answer) == [A]
        assert headers["x-data-parallel-rank"] in ("0", "1")


async def test_a_rank_of_one_engine_is_no_rank_of_another() -> None:
    """Envoy goes on to the next address with the headers it was told: of all, only those that they fit are named."""
    ranked = {"id": "a", "url": f"http://{A}", "data_parallel": {"ranks": [0, 1]}}
    endpoints: Any = [ranked, {"id": "b", "url": f"http://{B}"}, {"id": "c", "url": f"http://{C}"}]
    async with running_picker(endpoints=endpoints, picker={"fallbacks": 4}) as picker:
        found = [destination(await picker.ask().pick(chat(f"{number} " * 2000))) for number in range(4)]
        assert sorted(map(len, found)) == [1, 1, 2, 2]
        assert all(one == [A] or set(one) == {B, C} for one in found)


async def test_more_than_may_be_held_is_refused() -> None:
    """A place that Envoy never settles is held until its lease runs out; the next one is told to come back."""
    async with running_picker() as picker:
        held = picker.server._conversations.placer.held
        held._limit = 2
        first, second = picker.ask(), picker.ask()
        await first.pick()
        await second.pick()
        assert refusal(await picker.ask().pick())[:2] == (429, "too_many_requests")
        assert sum(picker.in_flight().values()) == 2
        await first.finish()
        assert destination(await picker.ask().pick())


async def test_engines_with_all_they_take_shed() -> None:
    """429 with a time to come back; nothing is reserved, and nothing is left over."""
    async with running_picker(endpoints={"a": f"http://{A}"}, max_in_flight=1) as picker:
        first = picker.ask()
        await first.pick()
        assert refusal(await picker.ask().pick()) == (429, "saturated", "1")
        assert picker.metric("kvproxy_picker_requests_total", mode="buffered", result="refused") == 1
        await first.finish()
        assert destination(await picker.ask().pick()) == [A]


async def test_a_model_that_none_serves_is_unknown() -> None:
    """404, since another try changes nothing."""
    endpoints: Any = [{"id": "a", "url": f"http://{A}", "models": ["other"]}]
    async with running_picker(endpoints=endpoints) as picker:
        assert refusal(await picker.ask().pick())[:2] == (404, "model_not_served")


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, DUPLEX])
async def test_a_body_beyond_the_limit_is_refused(mode: int) -> None:
    """And what was held of it is given back."""
    async with running_picker(limits={"body": "64KiB"}) as picker:
        assert refusal(await picker.ask(request_mode=mode).pick(b"x" * 70_000))[:2] == (413, "body_too_large")
        await until(lambda: picker.proxy.bodies.held_bytes == 0)


async def test_bodies_of_all_requests_have_a_bound() -> None:
    """Beyond it a request is refused, or its stream ends; the bytes come back."""
    limits = {"body": "64KiB", "bodies": "64KiB"}
    async with running_picker(limits=limits) as picker:
        first = picker.ask(request_mode=DUPLEX)
        await first.say_headers()
        await first.say_body(b"x" * 60_000, ended=False)
        await until(lambda: picker.proxy.bodies.held_bytes == 60_000)
        second = picker.ask(request_mode=DUPLEX)
        await second.say_headers()
        await second.say_body(b"x" * 10_000, ended=False)
        assert refusal(await second.hear())[:2] == (503, "bodies_full")
        first.call.cancel()
        await until(lambda: picker.proxy.bodies.held_bytes == 0)


async def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    """The stream ends; what Envoy does then is its configuration's."""
    async with running_picker(limits={"body_timeout": "50ms"}) as picker:
        envoy = picker.ask()
        await envoy.say_headers()
        await envoy.hear()
        assert (await envoy.status())[0] == "DEADLINE_EXCEEDED"
        assert picker.metric("kvproxy_picker_requests_total", mode="buffered", result="body_timeout") == 1


async def test_the_router_queue_holds_a_request_until_its_turn() -> None:
    """Envoy waits as our own clients would; a stream that ends while it waits leaves nothing behind."""
    queue = {"max_wait": "60s"}
    async with running_picker(endpoints={"a": f"http://{A}"}, queue=queue) as picker:
        first = picker.ask(response_mode=BodyMode.STREAMED)
        await first.pick(chat("word " * 20_000, stream=True))
        second, third = picker.ask(), picker.ask()
        for envoy in (second, third):
            await envoy.say_headers()
            await envoy.hear()
            await envoy.say_body(chat("other " * 20_000))
        cluster = picker.proxy.clusters["default"]
        assert cluster.queue is not None
        await until(lambda: cluster.queue is not None and len(cluster.queue) == 2)
        third.call.cancel()
        await until(lambda: cluster.queue is not None and len(cluster.queue) == 1)
        assert picker.in_flight() == {"a": 1}
        await first.answer(ended=True)
        await first.finish()
        assert destination(await second.hear()) == [A]
        await second.finish()
        await until(lambda: picker.in_flight() == {"a": 0})


@pytest.mark.parametrize(
    "message",
    [{"request_body": {"body": b"{}", "end_of_stream": True}}, {"response_headers": {}}, {"request_trailers": {}}, {}],
)
async def test_a_conversation_begins_with_the_request_headers(message: dict[str, Any]) -> None:
    """Anything else is an error that says so."""
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.say(**message)
        assert await envoy.status() == ("INVALID_ARGUMENT", "the first message is not request_headers")


@pytest.mark.parametrize(
    "message", [{"request_headers": {}}, {"response_body": {}}, {"response_trailers": {}}, {"request_body": {}}, {}]
)
async def test_a_message_out_of_turn_ends_the_stream(message: dict[str, Any]) -> None:
    """After the pick; what it reserved is given back."""
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.pick()
        await envoy.say(**message)
        code, why = await envoy.status()
        assert (code, why.endswith("out of turn")) == ("INVALID_ARGUMENT", True)
        await until(lambda: sum(picker.in_flight().values()) == 0)
        assert picker.metric("kvproxy_picker_requests_total", mode="buffered", result="malformed") == 1


async def test_streams_that_end_at_any_moment_leave_nothing() -> None:
    """Before the body, in it, at the pick, and in the answer: no load, no held byte, no stream."""
    async with running_picker() as picker:
        for moment in range(5):
            envoy = picker.ask(request_mode=DUPLEX, response_mode=BodyMode.STREAMED)
            await envoy.say_headers()
            if moment > 0:
                await envoy.say_body(b'{"model"', ended=False)
            if moment > 1:
                await envoy.say_body(b': "m"}')
            if moment > 2:
                destination(await envoy.hear())
                await envoy.hear()
            if moment > 3:
                await envoy.answer()
            envoy.call.cancel()
        await until(lambda: sum(picker.in_flight().values()) == 0)
        await until(lambda: picker.proxy.bodies.held_bytes == 0)
        await until(lambda: picker.server.streams == 0)


async def test_envoys_own_answer_ends_a_request_that_is_not_placed() -> None:
    """As when its body is too large for Envoy: nothing is picked."""
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.say_headers()
        await envoy.hear()
        assert (await envoy.answer(status=413, served="", details="request_payload_too_large")).HasField(
            "response_headers"
        )
        assert (await envoy.finish())[0] == "OK"
        assert picker.metric("kvproxy_picker_requests_total", mode="buffered", result="picked") == 0


async def test_many_streams_share_a_connection() -> None:
    """And none waits for another."""
    async with running_picker() as picker:
        asked = [picker.ask() for _ in range(64)]
        answers = await asyncio.gather(*(envoy.pick(chat(f"{number} " * 50)) for number, envoy in enumerate(asked)))
        assert {destination(answer)[0] for answer in answers} == {A, B, C}
        assert sum(picker.in_flight().values()) == 64
        for envoy in asked:
            envoy.call.cancel()
        await until(lambda: sum(picker.in_flight().values()) == 0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_call_leaves_no_cycle(*, leaves: bool) -> None:
    """One would keep its body until all garbage is collected."""
    async with running_picker() as picker:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            envoy = picker.ask()
            await envoy.pick()
            if leaves:
                envoy.call.cancel()
            else:
                await envoy.answer()
                await envoy.finish()
            await until(lambda: picker.server.streams == 0)
            gc.collect()
            assert [one for one in gc.garbage if isinstance(one, CarriedRequest | Exchange)] == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
