"""Lessons of the answers: times, token counts, ends, and where a request really went."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.features.picker import server
from kvproxy.features.picker.messages import BodyMode
from tests.features.picker.support import USAGE, A, B, C, chat, destination, fields_of, running_picker, served_metadata
from tests.support.until import until

DUPLEX, STREAMED = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.STREAMED


def event(data: bytes) -> bytes:
    """One of a stream."""
    return b"data: " + data + b"\n\n"


@pytest.mark.parametrize("mode", [STREAMED, DUPLEX])
async def test_a_stream_teaches_its_first_byte_its_counts_and_its_end(mode: int) -> None:
    """And what the engine reused confirms or corrects what was predicted."""
    async with running_picker() as picker:
        envoy = picker.ask(response_mode=mode)
        await envoy.pick(chat(stream=True))
        (endpoint,) = [one for one in picker.proxy.clusters["default"].endpoints if one.load.in_flight]
        assert endpoint.load.pending_requests == 1
        headers = await envoy.answer(**{"content-type": "text/event-stream"})
        mutation = headers.response_headers.response.header_mutation
        assert [(one.header.key, one.header.raw_value) for one in mutation.set_headers] == [
            ("x-kvproxy-endpoint", endpoint.id.encode())
        ]
        piece = event(b'{"choices":[{"delta":{"content":"x"}}]}')
        passed = (await envoy.say_piece(piece)).response_body.response
        assert passed.body_mutation.streamed_response.body == (piece if mode == DUPLEX else b"")
        assert (endpoint.load.pending_requests, endpoint.load.in_flight) == (0, 1)
        last = (await envoy.say_piece(event(USAGE) + event(b"[DONE]"), ended=True)).response_body.response
        assert last.body_mutation.streamed_response.end_of_stream == (mode == DUPLEX)
        assert endpoint.load.in_flight == 0
        assert picker.metric("kvproxy_cached_tokens_total", cluster="default") == 512
        assert picker.metric("kvproxy_prompt_tokens_total", cluster="default") == 600
        assert picker.metric("kvproxy_picker_served_total", result="as_picked") == 1
        assert picker.metric("kvproxy_request_ends_total", end="completed") == 1
        (kept,) = picker.proxy.recent.latest()
        assert (kept.outcome.endpoint, kept.outcome.status, kept.streamed) == (endpoint.id, 200, True)
        assert await envoy.finish() == ("OK", "")


async def test_counts_are_read_however_the_answer_is_cut() -> None:
    """Also of one that is not streamed, in pieces."""
    whole = b'{"id":"1","choices":[{"message":{"content":"' + b"x" * 50_000 + b'"}}],' + USAGE[len(b'{"choices":[],') :]
    async with running_picker() as picker:
        envoy = picker.ask(response_mode=STREAMED)
        await envoy.pick()
        await envoy.answer()
        for start in range(0, len(whole), 16_000):
            await envoy.say_piece(whole[start : start + 16_000], ended=start + 16_000 >= len(whole))
        assert picker.metric("kvproxy_cached_tokens_total", cluster="default") == 512


async def test_an_answer_whose_body_is_not_sent_ends_with_the_stream() -> None:
    """Its first byte is unknown: nothing is said of it, and the end is when Envoy is through with the request."""
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.pick(chat(stream=True))
        await envoy.answer()
        assert sum(picker.in_flight().values()) == 1
        await envoy.finish()
        assert sum(picker.in_flight().values()) == 0
        assert picker.metric("kvproxy_pick_reservations_total", result="success") == 1
        assert (
            picker.metric("kvproxy_ttft_seconds_count", cluster="default", endpoint="a", model="m", stream="true") == 0
        )
        (kept,) = picker.proxy.recent.latest()
        assert not kept.streamed


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, "success"), (404, "client_error"), (503, "busy"), (500, "failure")]
)
async def test_an_answers_status_says_how_it_went(status: int, outcome: str) -> None:
    """As for requests that we carry."""
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.pick()
        await envoy.answer(status=status, ended=True)
        assert picker.metric("kvproxy_pick_reservations_total", result=outcome) == 1
        assert sum(one.health.failures for one in picker.proxy.clusters["default"].endpoints) == (status == 500)


async def test_an_error_event_ends_no_answer_well() -> None:
    """The engine died in its answer, which began with 200."""
    async with running_picker() as picker:
        envoy = picker.ask(response_mode=STREAMED)
        await envoy.pick(chat(stream=True))
        await envoy.answer()
        await envoy.say_piece(event(b'{"error":{"message":"died","type":"server_error","code":500}}'), ended=True)
        assert picker.metric("kvproxy_pick_reservations_total", result="success") == 0
        assert picker.metric("kvproxy_request_ends_total", end="engine_error") == 1


@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_that_leaves_blames_no_endpoint(answered: bool) -> None:
    """Before the answer, or in it."""
    async with running_picker() as picker:
        envoy = picker.ask(response_mode=STREAMED)
        await envoy.pick(chat(stream=True))
        if answered:
            await envoy.answer()
            await envoy.say_piece(event(b"{}"))
        envoy.call.cancel()
        await until(lambda: sum(picker.in_flight().values()) == 0)
        assert picker.metric("kvproxy_pick_reservations_total", result="cancelled") == 1
        assert picker.metric("kvproxy_request_ends_total", end="client_disconnected") == 1
        assert not any(one.health.failures for one in picker.proxy.clusters["default"].endpoints)


@pytest.mark.parametrize("told", ["attribute", "metadata"])
async def test_the_endpoint_that_served_has_the_load_and_the_prompt(told: str) -> None:
    """Envoy took the second of the list: load, index and receipt follow it, by its attribute or the protocol's word."""
    async with running_picker() as picker:
        envoy = picker.ask(response_mode=STREAMED)
        chosen, second = destination(await envoy.pick(chat(stream=True)))
        names = {A: "a", B: "b", C: "c"}
        if told == "attribute":
            await envoy.answer(served=second)
        else:
            await envoy.say(
                response_headers={"headers": fields_of({":status": "200"})}, metadata_context=served_metadata(second)
            )
            await envoy.hear()
        assert {one: load for one, load in picker.in_flight().items() if load} == {names[second]: 1}
        await envoy.say_piece(event(USAGE), ended=True)
        assert picker.metric("kvproxy_picker_served_total", result="fallback") == 1
        assert picker.metric("kvproxy_pick_reservations_total", result="unproven") == 1
        assert picker.metric("kvproxy_requests_total", cluster="default", endpoint=names[second], status="200") == 1
        assert destination(await picker.ask().pick(chat(stream=True)))[0] == second != chosen


async def test_an_endpoint_that_was_not_named_has_the_load_if_it_is_ours() -> None:
    """Envoy did not know those that were: its members are to be looked at."""
    async with running_picker(picker={"fallbacks": 0}) as picker:
        envoy = picker.ask(subset=[A])
        await envoy.pick()
        await envoy.answer(served=C)
        assert picker.in_flight() == {"a": 0, "b": 0, "c": 1}
        assert picker.metric("kvproxy_picker_served_total", result="elsewhere") == 1
        await envoy.finish()
        assert picker.in_flight() == {"a": 0, "b": 0, "c": 0}


async def test_an_address_that_is_none_of_ours_has_no_load() -> None:
    """And nothing is learned from it."""
    async with running_picker() as picker:
        envoy = picker.ask(response_mode=STREAMED)
        await envoy.pick()
        answer = await envoy.answer(served="10.1.2.3:8000")
        assert not answer.response_headers.response.header_mutation.set_headers
        assert picker.metric("kvproxy_picker_served_total", result="unknown") == 1
        assert sum(picker.in_flight().values()) == 0
        await envoy.say_piece(USAGE, ended=True)
        assert picker.metric("kvproxy_pick_reservations_total", result="success") == 0


@pytest.mark.parametrize(
    ("details", "outcome"),
    [("upstream_reset_before_response_started{connection_failure}", "failure"), ("no_healthy_upstream", "cancelled")],
)
async def test_envoys_own_answer_blames_only_what_was_reached(details: str, outcome: str) -> None:
    """A connection that failed is the endpoint's; that Envoy knows none is not."""
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.pick()
        await envoy.answer(status=503, served="", details=details, ended=True)
        assert picker.metric("kvproxy_pick_reservations_total", result=outcome) == 1
        assert sum(picker.in_flight().values()) == 0


async def test_a_lease_bounds_what_envoy_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that hangs holds no load for ever, and its end later changes nothing."""
    monkeypatch.setattr(server, "LEASE_S", 0.02)
    async with running_picker() as picker:
        envoy = picker.ask()
        await envoy.pick()
        await until(lambda: picker.metric("kvproxy_pick_reservations_total", result="expired") == 1)
        assert sum(picker.in_flight().values()) == 0
        await envoy.answer()
        assert await envoy.finish() == ("OK", "")
        assert picker.metric("kvproxy_pick_reservations_total", result="success") == 0


async def test_a_session_is_read_from_headers() -> None:
    """As by the proxy itself, with the configured name first; the client is counted."""
    filters: Any = [{"inference_request": {"session_header": "x-mine"}}, "kvcache", "router"]
    async with running_picker(policy="session", filters=filters) as picker:
        places = set()
        for number in range(4):
            envoy = picker.ask(headers={"x-mine": "one", "user-agent": "claude-cli/2.1"})
            places.add(destination(await envoy.pick(chat(f"{number}")))[0])
        assert len(places) == 1
        assert picker.metric("kvproxy_client_requests_total", client="claude-code", session="named") == 4


async def test_an_alias_is_written_as_its_model() -> None:
    """In the body that Envoy sends on, in both modes."""
    routes = [{"model": "alias", "cluster": "default", "upstream_model": "real"}]
    async with running_picker(routes=routes) as picker:
        body = chat().replace(b'"m"', b'"alias"')
        answer = await picker.ask().pick(body)
        assert answer.request_body.response.body_mutation.body == body.replace(b"alias", b"real")
        headers = {one.header.key: one.header.raw_value
                   for one in answer.request_body.response.header_mutation.set_headers}  # fmt: skip
        assert headers["content-length"] == b"%d" % (len(body) - 1)
        duplex = picker.ask(request_mode=DUPLEX)
        destination(await duplex.pick(body))
        streamed = (await duplex.hear()).request_body.response.body_mutation.streamed_response
        assert streamed.body == body.replace(b"alias", b"real")


async def test_receipts_tell_of_what_envoy_carried(tmp_path: Any) -> None:
    """The decision, and its end."""
    path = tmp_path / "receipts.jsonl"
    async with running_picker(receipts={"path": str(path)}) as picker:
        envoy = picker.ask(headers={"x-request-id": "the-one"})
        await envoy.pick()
        await envoy.answer(ended=True)
    (line,) = path.read_text().splitlines()
    assert '"request_id":"the-one"' in line
    assert '"status":200' in line
