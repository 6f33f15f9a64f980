"""Requests in two legs, end to end on simulated engines, and what becomes of each failure."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import EndpointId
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.features.disaggregation import prefill_leg
from kvproxy.features.disaggregation.note import NOTE, Legs
from kvproxy.features.disaggregation.settings import Connector, DisaggregationPlace
from kvproxy.lab.simulator.vllm_settings import NixlLinks
from tests.features.disaggregation.support import Fleet, Separated, prompt, separated, text_of, until_freed, words
from tests.support.proxy import ask_in_process
from tests.support.until import until

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": words("chat")}], "max_tokens": 6},
    "/v1/completions": {"prompt": words("completion"), "max_tokens": 6},
    "/v1/responses": {"input": words("responses"), "max_output_tokens": 6},
    "/v1/messages": {"messages": [{"role": "user", "content": words("messages")}], "max_tokens": 6},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_is_that_of_one_engine(stream: bool) -> None:
    """The decoder pulls the whole prompt, and computes none of it."""
    async with separated("p", "d") as two:
        for number in range(10):
            text = words(f"{number}", 20 + 20 * number)
            answer = await two.ask(text, stream=stream)
            assert answer.headers["x-kvproxy-endpoint"] == "d"
            assert text_of(answer) == await two.ask_engine("d", text)
        assert two.requests("pulled") == 10
        assert two.prefills("p", "done") == 10
        assert two.fleet.side("d").pulled_tokens > 0
        assert not two.fleet.side("p").held


async def test_many_long_prompts_at_once() -> None:
    """However many blocks wait for the decoder, each prompt has all of its own."""
    async with separated("p", "d", links=NixlLinks(s_per_token=0.001)) as two:
        texts = [words(f"{number}", 300) for number in range(24)]
        answers = await asyncio.gather(*map(two.ask, texts))
        assert [text_of(answer) for answer in answers] == [await two.ask_engine("d", text) for text in texts]
        assert not two.fleet.is_dead("d")
        assert two.requests("pulled") == len(texts)


@pytest.mark.parametrize("path", PATHS)
async def test_every_api_goes_in_two_legs(path: str) -> None:
    """The first leg generates one token, by each API's own bound."""
    async with separated("p", "d") as two:
        body = {"model": "tiny", "temperature": 0, **PATHS[path]}
        answer = await two.proxy.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        async with httpx.AsyncClient(base_url=two.fleet.urls["d"]) as client:
            alone = (await client.post(path, json={**body, "cache_salt": "alone"})).json()
        said = answer.json()
        for key in ("choices", "output", "content"):
            if key in alone:
                assert _texts(said[key]) == _texts(alone[key])
        assert two.requests("pulled") == 1
        assert two.fleet.apps["p"].state.metrics.render_exposition().count(b"vllm:generation_tokens_total") > 0
        (prefilled,) = two.fleet.apps["p"].state.requests
        assert prefilled["stream"] is False


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [one for key, inner in value.items() if key != "id" for one in _texts(inner)]
    if isinstance(value, list):
        return [one for inner in value for one in _texts(inner)]
    return [value] if isinstance(value, str) and not value.startswith(("msg_", "resp_")) else []


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"echo": True}, {"prompt": [words("a"), words("b")]}, {"prompt_logprobs": 1}, {"best_of": 2}],
    ids=lambda fields: next(iter(fields)),
)
async def test_requests_that_need_more_than_the_prompts_kv_go_whole(fields: dict[str, Any]) -> None:
    """Each of several prompts would pull the blocks of one, which ends an engine."""
    async with separated("p", "d") as two:
        await two.proxy.client.post("/v1/completions", json={**prompt(words("x")), **fields})
        assert two.fleet.calls("p") == 0
        assert two.fleet.calls("d") == 1


async def test_a_short_prompt_stays_at_the_decoder() -> None:
    """By `min_tokens`."""
    async with separated("p", "d", disaggregation={"min_tokens": 1000}) as two:
        assert text_of(await two.ask(words("short"))) == await two.ask_engine("d", words("short"))
        assert two.fleet.calls("p") == 0


async def test_a_clients_own_parameters_do_not_reach_an_engine() -> None:
    """They could crash a decoder, or have it read another user's KV."""
    async with separated("p", "d") as two:
        await two.ask(words("first"))
        stolen = {"do_remote_prefill": True, "remote_block_ids": [[0, 1]], "remote_engine_id": "x"}
        answer = await two.ask(words("second"), kv_transfer_params=stolen)
        assert text_of(answer) == await two.ask_engine("d", words("second"))
        assert not two.fleet.is_dead("d")


async def test_a_prompt_counts_as_held_by_the_decoder_once_it_was_pulled() -> None:
    """Until then a request with the same prompt goes in two legs as well; then it needs none."""
    config: dict[str, Any] = {
        "policy": "prefix_affinity",
        "filters": ["inference_request", "kvcache", "router"],
        "disaggregation": {"min_tokens": 100},  # more than the end of a prompt, which fills no block
    }
    async with separated("p", "d", **config) as two:
        two.fleet.fault("p", stall_head_s=600.0)
        first = asyncio.create_task(two.ask(words("same")))
        await until(lambda: two.fleet.apps["p"].state.in_flight == 1)
        second = asyncio.create_task(two.ask(words("same")))
        await until(lambda: two.fleet.apps["p"].state.in_flight == 2)
        two.fleet.fault("p", stall_head_s=0.0)
        await asyncio.gather(first, second)
        await two.ask(words("same"))
        assert (two.fleet.calls("p"), two.fleet.calls("d")) == (2, 3)
        assert two.requests("pulled") == 2


# Failures of the first leg.


@pytest.mark.parametrize("fault", ["no_handle", "no_request_id"])
async def test_an_answer_without_a_usable_handle_leaves_the_prompt_to_the_decoder(fault: str) -> None:
    """Without `remote_request_id` a decoder hangs, and dies of the client that gives up."""
    async with separated("p", "d") as two:
        two.fleet.fault("p", kv_fault=fault)
        async with asyncio.timeout(60):
            assert text_of(await two.ask(words(fault))) == await two.ask_engine("d", words(fault))
        assert two.prefills("p", "no_handle") == 1
        assert two.requests("local") == 1
        assert not two.fleet.is_dead("d")


async def test_blocks_whose_lease_is_over_are_not_read() -> None:
    """They may hold another prompt by then: the decoder computes this one."""
    async with separated("p", "d", disaggregation={"lease": 1e-6}) as two:
        two.fleet.fault("p", kv_fault="other_prompt")
        assert text_of(await two.ask(words("late"))) == await two.ask_engine("d", words("late"))
        assert (two.prefills("p", "done"), two.requests("local")) == (1, 1)
        assert two.fleet.side("d").pulled_tokens == 0


async def test_another_endpoint_prefills_for_one_that_is_busy() -> None:
    """Within the same request."""
    async with separated("p", "q", "d") as two:
        two.fleet.fault("p", busy_next=100)
        two.fleet.fault("q", busy_next=0)
        for number in range(4):
            assert text_of(await two.ask(words(f"{number}"))) == await two.ask_engine("d", words(f"{number}"))
        assert two.requests("pulled") == 4
        assert two.prefills("p", "busy") >= 1


async def test_a_prefill_that_takes_too_long_is_left() -> None:
    """Its own limit is no error of the request."""
    async with separated("p", "d", disaggregation={"prefill_timeout": 0.2}) as two:
        two.fleet.fault("p", stall_head_s=600.0)
        async with asyncio.timeout(60):
            assert text_of(await two.ask(words("slow"))) == await two.ask_engine("d", words("slow"))
        assert two.prefills("p", "timeout") == 1


async def test_an_engine_that_dies_of_a_prompt_is_not_followed_by_another() -> None:
    """The decoder is the second engine that gets it; no other prefills it."""
    async with separated("p", "q", "d") as two:
        two.fleet.fault("p", fail_next=100)
        two.fleet.fault("q", fail_next=100)
        assert text_of(await two.ask(words("x"))) == await two.ask_engine("d", words("x"))
        assert two.prefills("p", "status_5xx") + two.prefills("q", "status_5xx") == 1


async def test_no_prefiller_at_all() -> None:
    """All of them are gone: decoders serve as ever."""
    async with separated("p", "d") as two:
        two.fleet.fault("p", engine_dead=True)
        for number in range(5):
            assert text_of(await two.ask(words(f"{number}"))) == await two.ask_engine("d", words(f"{number}"))
        assert two.requests("local") >= 1


# Failures of the second leg.


async def test_a_refused_handle_is_not_used_again() -> None:
    """The decoder's engine lives: it computes the prompt itself, at once, and its pair is examined first."""
    async with separated("p", "d") as two:
        two.fleet.fault("p", kv_fault="unknown_engine")
        assert text_of(await two.ask(words("x"))) == await two.ask_engine("d", words("x"))
        assert two.requests("refused") == 1


async def test_a_prefill_whose_handle_is_refused_was_done() -> None:
    """Both engines have the prompt, which the decoder computed once more. A prefill that failed leaves nothing."""
    config: dict[str, Any] = {"policy": "prefix_affinity", "filters": ["inference_request", "kvcache", "router"]}
    async with separated("p", "d", **config) as two:
        assert two.proxy.proxy.kvcache is not None
        held = two.proxy.proxy.kvcache.overlap.indexes["default"].approximate.counts.held_blocks
        two.fleet.fault("p", kv_fault="unknown_engine")
        await two.ask(words("x"))
        assert two.requests("refused") == 1
        assert held(EndpointId("p")) == held(EndpointId("d")) > 0
        two.fleet.fault("p", kv_fault="", fail_next=1)
        await two.ask(words("y"))
        assert two.requests("local") == 1
        assert held(EndpointId("d")) == 2 * held(EndpointId("p"))


async def test_a_prefiller_that_dies_between_the_legs_leaves_the_prompt_to_the_decoder() -> None:
    """Its answer had come: the decoder has no peer to pull from."""
    async with separated("p", "d") as two:
        two.fleet.fault("p", kv_fault="dies_after")
        text = words("dies after its prefill")
        assert text_of(await two.ask(text)) == await two.ask_engine("d", text)
        assert two.fleet.is_dead("p")
        assert not two.fleet.is_dead("d")
        assert (two.requests("refused"), two.prefills("p", "done")) == (1, 1)


async def test_a_request_that_the_prefiller_does_not_know_is_pulled_all_the_same() -> None:
    """The text is right, by its blocks; these wait for the end of their lease, since the prefiller is not told."""
    async with separated("p", "d") as two:
        two.fleet.fault("p", kv_fault="unknown_request")
        text = words("unknown request")
        assert text_of(await two.ask(text)) == await two.ask_engine("d", text)
        assert two.requests("pulled") == 1
        assert len(two.fleet.side("p").held) == 1


async def test_a_decoder_that_dies_of_a_handle_is_replaced() -> None:
    """Fewer blocks than the prompt needs end its process: the other decoder answers, without a handle."""
    async with separated("p", "d", "e") as two:
        two.fleet.fault("p", kv_fault="fewer_blocks")
        answer = await two.ask(words("x"))
        (dead,) = (name for name in ("d", "e") if two.fleet.is_dead(name))
        alive = "e" if dead == "d" else "d"
        assert text_of(answer) == await two.ask_engine(alive, words("x"))
        assert answer.headers["x-kvproxy-endpoint"] == alive
        assert two.requests("failed") == 1
        latest = next(two.proxy.proxy.recent.latest())
        assert cast("Legs", latest.outcome.notes[NOTE]).result == "failed"


async def test_a_decoder_that_does_not_answer_is_left() -> None:
    """Its own limit; another decoder answers."""
    async with separated("p", "d", "e", disaggregation={"decode_timeout": 2.0}) as two:
        two.fleet.fault("d", stall_head_s=600.0)
        async with asyncio.timeout(60):
            for number in range(2):
                assert text_of(await two.ask(words(f"{number}"))) == await two.ask_engine("e", words(f"{number}"))
        two.fleet.fault("d", reset=True)


# Legs that reach the other kind of engine: the addresses are mixed up.


@pytest.mark.parametrize(("name", "of"), [("p", "e"), ("d", "q"), ("p", "d")])
async def test_a_leg_that_reaches_the_other_kind_of_engine_is_answered_all_the_same(name: str, of: str) -> None:
    """By vLLM, whose engines do both: the text is right, and no block waits for its lease."""

    def mix_up(fleet: Fleet) -> None:
        fleet.urls[name] = fleet.urls[of].replace("127.0.0.1", "localhost")

    async with separated("p", "q", "d", "e", plant=mix_up) as two:
        for number in range(8):
            text = words(f"{number}")
            assert text_of(await two.ask(text)) == await two.ask_engine("e", text)
        assert two.requests("pulled") == 8
        assert not any(two.fleet.is_dead(one) or two.fleet.side(one).held for one in "pqde")


# Clients that leave.


async def test_a_client_that_leaves_during_the_prefill_holds_no_blocks() -> None:
    """The prefill is aborted, and the decoder never gets the request."""
    async with separated("p", "d") as two:
        two.fleet.fault("p", stall_head_s=600.0)
        await _leave(two, until_there="p")
        await until(lambda: two.fleet.apps["p"].state.in_flight == 0)
        assert two.fleet.calls("d") == 0
        assert not two.fleet.side("p").held
        await until(lambda: two.requests("left") == 1)
        assert all(one.load.in_flight == 0 for one in two.proxy.proxy.clusters["default"].endpoints)


async def test_a_client_that_leaves_during_the_decode_leg_frees_both() -> None:
    """Blocks are not held for the lease, and the decoder lives."""
    async with separated("p", "d") as two:
        two.fleet.fault("d", stall_head_s=600.0)
        await _leave(two, until_there="d")
        await until(lambda: two.fleet.apps["d"].state.in_flight == 0)
        await until_freed(two.fleet.side("p"))
        assert not two.fleet.is_dead("d")
        await until(lambda: all(one.load.in_flight == 0 for one in two.proxy.proxy.clusters["default"].endpoints))


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_while_the_prefills_answer_comes_frees_its_blocks(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefill is over, so that only a decode leg frees them: it is sent, and aborted. No engine is blamed."""
    monkeypatch.setattr(prefill_leg, "FREEING_S", 60.0)  # a machine that stands still is no engine that sends no answer
    head_came = asyncio.Event()

    async def read(response: UpstreamResponse) -> bytes:
        head_came.set()
        return await read_answer(response)

    read_answer = prefill_leg._read_answer
    monkeypatch.setattr(prefill_leg, "_read_answer", read)
    async with separated("p", "d") as two:
        two.fleet.fault("p", stall_body_s=600.0)
        asked = asyncio.create_task(ask_in_process(two.proxy, {"model": "tiny", **PATHS[path]}, path=path))
        await head_came.wait()
        assert two.fleet.side("p").held
        asked.cancel()
        await asyncio.sleep(0)
        two.fleet.fault("p", stall_body_s=0.0)
        await asyncio.wait([asked])
        assert asked.cancelled()
        await until_freed(two.fleet.side("p"))
        await until(lambda: two.fleet.apps["d"].state.in_flight == 0)
        endpoints = two.proxy.proxy.clusters["default"].endpoints
        assert not any(one.load.in_flight or one.health.failures or one.health.unserved for one in endpoints)
        assert two.requests("left") == 1
        assert not caplog.records


async def _leave(two: Separated, *, until_there: str) -> None:
    task = asyncio.create_task(two.ask(words("leaves")))
    await until(lambda: two.fleet.apps[until_there].state.in_flight == 1)
    task.cancel()
    await asyncio.wait([task])


# Reloads.


async def test_a_reload_switches_it_on_and_off() -> None:
    """From the next request on."""
    async with separated("p", "d", disaggregation={"connector": "off"}) as two:
        await two.ask(words("off"))
        assert two.fleet.calls("p") == 0
        raw = two.proxy.proxy.config
        for connector, pulled in (("nixl", 1), ("off", 1)):
            cluster = raw.clusters["default"]
            settings = part_of(cluster, DisaggregationPlace).disaggregation
            wanted = settings.model_copy(update={"connector": Connector(connector)})
            place = cluster.model_copy(update={"disaggregation": wanted})
            await two.proxy.proxy.reload(raw.model_copy(update={"clusters": {"default": place}}))
            await two.ask(words(connector))
            assert two.requests("pulled") == pulled
