"""The canary: a pair carries requests once 16 tokens, separated and alone, were the same and counters moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.features.disaggregation.findings import find_pairs_out
from kvproxy.features.disaggregation.pairs import PairState
from tests.features.disaggregation.support import separated, text_of, words

PROVEN: dict[str, Any] = {"disaggregation": {"canary": 600}}


async def test_a_pair_is_proven_before_its_first_request() -> None:
    """Until then the decoder computes."""
    async with separated("p", "d", **PROVEN) as two:
        await two.ask(words("before"))
        assert two.prefills("p", "done") == 0
        assert await two.prove_pairs() == {("p", "d"): PairState.GOOD}
        assert text_of(await two.ask(words("after"))) == await two.ask_engine("d", words("after"))
        assert two.requests("pulled") == 1
        assert two.proxy.metric("kvproxy_disaggregation_canaries_total", cluster="default", result="equal") == 1
        pairs = two.proxy.metric("kvproxy_disaggregation_pairs", cluster="default", state="good")
        assert pairs == 1


@pytest.mark.parametrize(
    ("engine", "fault", "found"),
    [("p", "other_prompt", PairState.WRONG), ("d", "ignored", PairState.NO_EFFECT)],
)
async def test_a_pair_that_does_not_work_carries_no_request(engine: str, fault: str, found: PairState) -> None:
    """Another prompt's text with status 200 never reaches a client, and a decoder that computes all the same is
    reported."""
    async with separated("p", "d", **PROVEN) as two:
        two.fleet.fault(engine, kv_fault=fault)
        await two.ask(words("before"))
        assert await two.prove_pairs() == {("p", "d"): found}
        for number in range(3):
            assert text_of(await two.ask(words(f"{number}"))) == await two.ask_engine("d", words(f"{number}"))
        assert two.requests("pulled") == 0
        (trouble,) = find_pairs_out(two.proxy.proxy.clusters)
        assert trouble.what.startswith("prefill at p for d is off: ")
        assert ("pulled" in trouble.what) == (found is PairState.NO_EFFECT)


@pytest.mark.parametrize("fault", ["fewer_blocks", "no_request_id", "no_handle", "unknown_engine"])
async def test_a_pair_whose_canary_fails_stays_unproven(fault: str) -> None:
    """It is examined again later; requests go to the decoder alone."""
    async with separated("p", "d", "e", **PROVEN) as two:
        two.fleet.fault("p", kv_fault=fault)
        await two.ask(words("before"))
        await two.ask(words("before, too"))
        found = await two.prove_pairs()
        assert set(found.values()) == {PairState.UNPROVEN}


async def test_engines_of_two_versions_are_refused_before_traffic() -> None:
    """They refuse each other's handshake at best."""
    async with separated("p", "d", **PROVEN) as two:
        two.fleet.apps["p"].state.settings = replace(two.fleet.apps["p"].state.settings, version="0.31.0")
        await two.ask(words("before"))
        assert await two.prove_pairs() == {("p", "d"): PairState.VERSIONS}
        assert two.fleet.calls("p") == 0


async def test_an_engine_that_returns_is_examined_again() -> None:
    """It may be another process with other flags."""
    async with separated("p", "d", **PROVEN) as two:
        await two.ask(words("before"))
        await two.prove_pairs()
        cluster = two.proxy.proxy.clusters["default"]
        cluster.forget_process(next(one.engine for one in cluster.endpoints if one.id == "p"))
        await two.ask(words("after"))
        assert two.found() == {("p", "d"): PairState.UNPROVEN}
        assert two.prefills("p", "done") == 0


async def test_a_refused_handle_sends_its_pair_to_the_canary() -> None:
    """Before it carries another request."""
    async with separated("p", "d", **PROVEN) as two:
        await two.ask(words("before"))
        await two.prove_pairs()
        two.fleet.fault("p", kv_fault="unknown_engine")
        assert text_of(await two.ask(words("x"))) == await two.ask_engine("d", words("x"))
        assert two.requests("refused") == 1
        two.fleet.fault("p", kv_fault="")
        await two.ask(words("y"))
        assert two.prefills("p", "done") == 1
        await two.prove_pairs()
        await two.ask(words("z"))
        assert two.prefills("p", "done") == 2


async def test_a_pair_that_turns_bad_is_found_by_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    """Loudly."""
    async with separated("p", "d", **PROVEN) as two:
        await two.ask(words("before"))
        await two.prove_pairs()
        two.fleet.fault("p", kv_fault="other_prompt")
        (pair,) = two.state.pairs
        pair.due_at = 0.0
        assert await two.prove_pairs() == {("p", "d"): PairState.WRONG}
        assert "p -> d are used as a pair no more" in caplog.text
