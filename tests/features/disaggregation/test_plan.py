"""Where a prompt is computed, by the expected first token."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.costs import wait_s
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.features.disaggregation.plan import Plan, choose_plan, wait_before
from tests.cluster.conftest import Bench, MakeCluster, configs

STALL = 0.04


def fleet(make_cluster: MakeCluster, **roles: str) -> Bench:
    """Return a cluster of these."""
    bench: Bench = make_cluster()
    bench.cluster.apply_endpoints([one for name, role in roles.items() for one in configs(name, role=role)])
    return bench


def plans(
    bench: Bench,
    facts: OverlapFacts,
    speeds: SpeedModel | None,
    *,
    wait_s: float = 0.0,
    s_per_token: Mapping[str, float] = {},
) -> list[Plan]:
    """Return the plans for a request whose answer `d` gives."""
    now = bench.clock()
    prefillers = bench.cluster.screening.find_prefillers("", now)
    found = choose_plan(
        facts,
        bench.endpoint("d"),
        prefillers,
        speeds,
        now,
        stall=STALL,
        decode_wait_s=wait_s,
        s_per_token=lambda one: s_per_token.get(one.id, 0.000_02),
    )
    return list(found)


def decoding(bench: Bench, name: str, count: int) -> None:
    """Reserve requests whose answers are being generated there."""
    load = bench.endpoint(name).load
    for _ in range(count):
        load.first_token(load.reserve(10, 0, bench.clock()), bench.clock())


def test_an_idle_decoder_computes_alone(make_cluster: MakeCluster) -> None:
    """A pull costs more than nothing."""
    bench = fleet(make_cluster, p="prefill", d="decode")
    assert plans(bench, OverlapFacts(4000), SpeedModel()) == []


def test_answers_that_a_prefill_would_stall_send_it_elsewhere(make_cluster: MakeCluster) -> None:
    """The more there are, the more it saves."""
    bench = fleet(make_cluster, p="prefill", d="decode")
    decoding(bench, "d", 20)
    (plan,) = plans(bench, OverlapFacts(4000), SpeedModel())
    assert plan.prefill.id == "p"
    assert plan.expected_s < plan.local_s


def test_a_prompt_that_the_decoder_holds_stays(make_cluster: MakeCluster) -> None:
    """Only uncached tokens count, on either side."""
    bench = fleet(make_cluster, p="prefill", d="decode")
    decoding(bench, "d", 20)
    held = OverlapFacts(4000, {EndpointId("d"): Overlap(3950)})
    assert plans(bench, held, SpeedModel()) == []


def test_the_prefiller_that_holds_more_goes_first(make_cluster: MakeCluster) -> None:
    """Others follow, for the case that it fails."""
    bench = fleet(make_cluster, p="prefill", q="prefill", d="decode")
    decoding(bench, "d", 20)
    found = plans(bench, OverlapFacts(4000, {EndpointId("q"): Overlap(3000)}), SpeedModel())
    assert [plan.prefill.id for plan in found] == ["q", "p"]
    assert {plan.pulled_tokens for plan in found} == {4000}


def test_a_backlog_at_the_prefillers_keeps_the_prompt_at_the_decoder(make_cluster: MakeCluster) -> None:
    """Both sides are weighed by their waits."""
    bench = fleet(make_cluster, p="prefill", d="decode")
    decoding(bench, "d", 20)
    bench.endpoint("p").load.reserve(60_000, 0, bench.clock())
    assert plans(bench, OverlapFacts(4000), SpeedModel()) == []
    assert len(plans(bench, OverlapFacts(4000), SpeedModel(), wait_s=30.0)) == 1


@pytest.mark.parametrize(("role", "answers", "apart"), [("prefill", 6, 1), ("both", 6, 0), ("both", 12, 1)])
def test_an_endpoint_that_answers_too_prefills_what_comes_much_sooner(
    make_cluster: MakeCluster, role: str, answers: int, apart: int
) -> None:
    """Its own prompts come behind."""
    bench = fleet(make_cluster, p=role, d="decode")
    decoding(bench, "d", answers)
    assert len(plans(bench, OverlapFacts(4000), SpeedModel())) == apart


def test_over_a_slow_link_prompts_stay(make_cluster: MakeCluster) -> None:
    """A pull that takes longer than the prefill saves nothing."""
    bench = fleet(make_cluster, p="prefill", q="prefill", d="decode")
    decoding(bench, "d", 12)
    facts = OverlapFacts(4000)
    near, _ = plans(bench, facts, SpeedModel())
    assert near.pull_s == pytest.approx(0.085)
    assert plans(bench, facts, SpeedModel(), s_per_token={"p": 0.001, "q": 0.001}) == []
    assert [one.prefill.id for one in plans(bench, facts, SpeedModel(), s_per_token={"p": 0.001})] == ["q"]


def test_the_wait_at_a_decoder_is_that_of_others(make_cluster: MakeCluster) -> None:
    """A request that is counted in does not wait for itself."""
    bench = fleet(make_cluster, d="decode")
    decode = bench.endpoint("d")
    now = bench.clock()
    own = decode.load.reserve(4000, 0, now)
    assert wait_before(own, decode, SpeedModel(), now) == pytest.approx(0.0, abs=1e-6)
    before = wait_s(decode, SpeedModel(), now)
    second = decode.load.reserve(2000, 0, now)
    assert wait_before(second, decode, SpeedModel(), now) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("busy", ["p", "q"])
def test_without_speeds_the_least_busy_prefills(make_cluster: MakeCluster, busy: str) -> None:
    """Nothing says what is cheaper, so every such prompt is separated."""
    bench = fleet(make_cluster, p="prefill", q="prefill", d="decode")
    bench.endpoint(busy).load.reserve(10, 0, bench.clock())
    first, _ = plans(bench, OverlapFacts(4000), None)
    assert first.prefill.id != busy
