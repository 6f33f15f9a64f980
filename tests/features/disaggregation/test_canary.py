"""The canary: a pair carries requests once 16 tokens, separated and alone, were the same and counters moved."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest

from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.features.disaggregation import companion
from kvproxy.features.disaggregation.canary import Canary
from kvproxy.features.disaggregation.check import VisitedEngine
from kvproxy.features.disaggregation.connectors.nixl import NixlConnector
from kvproxy.features.disaggregation.findings import find_pairs_out
from kvproxy.features.disaggregation.pairs import RETRY_S, PairState
from kvproxy.lab.simulator.vllm_settings import NixlLinks
from tests.features.disaggregation.support import Fleet, Separated, running_fleet, separated, text_of, words
from tests.support.until import until

PROVEN: dict[str, Any] = {"disaggregation": {"canary": 600}}
PAIR = ("p", "d")


async def until_found(two: Separated, state: PairState) -> None:
    """Wait for the first canary, which the proxy sends of its own accord."""
    await until(lambda: two.found().get(PAIR) is state)


async def test_a_pair_is_proven_before_its_first_request() -> None:
    """Until then the decoder computes."""
    async with separated("p", "d", plant=lambda fleet: fleet.fault("p", stall_head_s=600.0), **PROVEN) as two:
        await two.ask(words("before"))
        assert two.prefills("p", "done") == 0
        two.fleet.fault("p", stall_head_s=0.0)
        await until_found(two, PairState.GOOD)
        assert text_of(await two.ask(words("after"))) == await two.ask_engine("d", words("after"))
        assert two.requests("pulled") == 1
        assert two.proxy.metric("kvproxy_disaggregation_canaries_total", cluster="default", result="equal") == 1
        assert two.proxy.metric("kvproxy_disaggregation_pairs", cluster="default", state="good") == 1


@pytest.mark.parametrize(
    ("engine", "fault", "found"),
    [("p", "other_prompt", PairState.WRONG), ("d", "ignored", PairState.NO_EFFECT)],
)
async def test_a_pair_that_does_not_work_carries_no_request(engine: str, fault: str, found: PairState) -> None:
    """Another prompt's text with status 200 never reaches a client, and a decoder that computes all the same is
    reported."""
    async with separated("p", "d", plant=lambda fleet: fleet.fault(engine, kv_fault=fault), **PROVEN) as two:
        await until_found(two, found)
        for number in range(3):
            assert text_of(await two.ask(words(f"{number}"))) == await two.ask_engine("d", words(f"{number}"))
        assert two.requests("pulled") == 0
        (trouble,) = find_pairs_out(two.proxy.proxy.clusters)
        assert trouble.what.startswith("prefill at p for d is off: ")
        assert ("pulled" in trouble.what) == (found is PairState.NO_EFFECT)


@pytest.mark.parametrize("fault", ["fewer_blocks", "no_request_id", "no_handle", "unknown_engine"])
async def test_a_pair_whose_canary_fails_stays_unproven(fault: str) -> None:
    """It is examined again later; requests go to the decoder alone."""
    async with separated("p", "d", "e", plant=lambda fleet: fleet.fault("p", kv_fault=fault), **PROVEN) as two:
        await two.prove_pairs()
        assert set(two.found().values()) == {PairState.UNPROVEN}
        assert two.proxy.metric("kvproxy_disaggregation_canaries_total", cluster="default", result="failed") >= 2


def older(fleet: Fleet) -> None:
    """Have the prefiller be of another version."""
    state = fleet.apps["p"].state
    state.settings = replace(state.settings, version="0.31.0")


async def test_engines_of_two_versions_are_refused_before_traffic() -> None:
    """They refuse each other's handshake at best."""
    async with separated("p", "d", plant=older, **PROVEN) as two:
        await until_found(two, PairState.VERSIONS)
        await two.ask(words("x"))
        assert two.fleet.calls("p") == 0


async def test_an_engine_that_returns_is_examined_again() -> None:
    """It may be another process with other flags."""
    async with separated("p", "d", **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        cluster = two.proxy.proxy.clusters["default"]
        two.fleet.fault("p", kv_fault="other_prompt")
        cluster.forget_process(next(one.engine for one in cluster.endpoints if one.id == "p"))
        assert two.found() == {}
        assert text_of(await two.ask(words("x"))) == await two.ask_engine("d", words("x"))
        await until_found(two, PairState.WRONG)


async def test_a_refused_handle_sends_its_pair_to_the_canary() -> None:
    """Before it carries another request."""
    async with separated("p", "d", **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        two.fleet.fault("p", kv_fault="unknown_engine")
        assert text_of(await two.ask(words("x"))) == await two.ask_engine("d", words("x"))
        assert two.requests("refused") == 1
        assert two.found() == {PAIR: PairState.UNPROVEN}
        two.fleet.fault("p", kv_fault="")
        assert await two.prove_pairs() == {PAIR: PairState.GOOD}
        await two.ask(words("z"))
        assert two.requests("pulled") == 1


async def test_a_handle_with_too_few_blocks_does_not_reach_a_decoder() -> None:
    """Its process would end; the canary has learned the size of a block."""
    async with separated("p", "d", **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        two.fleet.fault("p", kv_fault="fewer_blocks")
        assert text_of(await two.ask(words("x"))) == await two.ask_engine("d", words("x"))
        assert two.prefills("p", "no_handle") == 1
        assert not two.fleet.is_dead("d")


async def test_a_pair_that_turns_bad_is_found_by_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    """Loudly."""
    async with separated("p", "d", **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        two.fleet.fault("p", kv_fault="other_prompt")
        assert await two.prove_pairs() == {PAIR: PairState.WRONG}
        assert "p -> d are used as a pair no more" in caplog.text


async def test_a_sample_waits_for_idle_endpoints() -> None:
    """A canary that is not urgent gives way to requests, for one interval."""
    async with separated("p", "d", disaggregation={"canary": 60_000}) as two:
        await until_found(two, PairState.GOOD)
        load = next(one.load for one in two.proxy.proxy.clusters["default"].endpoints if one.id == "d")
        busy = [load.reserve(1, 0, 0.0) for _ in range(3)]
        two.fleet.fault("p", kv_fault="other_prompt")
        (pair,) = two.state.pairs
        pair.due_at = two.state.tools.clock()
        await two.run_round()
        assert two.found() == {PAIR: PairState.GOOD}
        for one in busy:
            load.release(one, 0.0)
        await two.run_round()
        assert two.found() == {PAIR: PairState.WRONG}


async def test_a_canary_measures_the_pull() -> None:
    """By a prompt that the decoder pulls, and then holds. Plans go by it."""
    times = iter((10.0, 14.0, 16.0, 16.5))
    async with running_fleet("p", "d") as fleet, UpstreamPool() as pool, httpx.AsyncClient() as http:
        engines = [VisitedEngine(Origin.parse(url), None) for url in fleet.urls.values()]
        clients = [VllmClient(http, url, timeout_s=60.0) for url in fleet.urls.values()]
        canary = Canary(NixlConnector(8998, Random(1)), pool=pool, rng=Random(1), timeout_s=60.0, clock=times.__next__)
        verdict = await canary.examine(engines[0], engines[1], (clients[0], clients[1]), "tiny")
        assert verdict.state is PairState.GOOD
        pulled = fleet.side("d").pulled_tokens // 2
        assert verdict.s_per_token == pytest.approx(3.5 / pulled, rel=0.05)


async def test_a_measured_pair_is_planned_by_its_own_link() -> None:
    async with separated("p", "d", **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        (pair,) = two.state.pairs
        assert pair.s_per_token != 0.000_02
        assert two.state.pairs.s_per_token(pair.prefill, pair.decode) == pair.s_per_token
        assert two.state.pairs.s_per_token(pair.decode, pair.prefill) == 0.000_02


async def test_busy_endpoints_do_not_teach_the_price_of_a_pull() -> None:
    """Its canary is overdue and sent all the same, but other requests' time is in its answers."""
    async with separated("p", "d", links=NixlLinks(s_per_token=0.002), **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        (pair,) = two.state.pairs
        pair.s_per_token = 0.5
        busy = [pair.decode.load.reserve(1, 0, 0.0) for _ in range(3)]
        assert await two.prove_pairs() == {PAIR: PairState.GOOD}
        assert pair.s_per_token == 0.5
        for one in busy:
            pair.decode.load.release(one, 0.0)
        await two.prove_pairs()
        assert pair.s_per_token < 0.5


async def test_a_late_canary_leaves_a_good_pair_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy engines are late, and what they answer is still right; it is sent again soon."""
    async with separated("p", "d", **PROVEN) as two:
        await until_found(two, PairState.GOOD)
        monkeypatch.setattr(companion, "TIMEOUT_S", 0.05)
        two.fleet.fault("p", stall_head_s=600.0)
        assert await two.prove_pairs() == {PAIR: PairState.GOOD}
        (pair,) = two.state.pairs
        assert pair.due_at <= two.state.tools.clock() + RETRY_S
        assert two.proxy.metric("kvproxy_disaggregation_canaries_total", cluster="default", result="failed") >= 1
