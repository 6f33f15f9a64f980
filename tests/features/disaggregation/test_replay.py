"""Replays of fleets with roles: both legs are played, counted once, and compared by rule."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvproxy.lab.replay.apart import RULES
from kvproxy.lab.replay.command import run
from kvproxy.lab.replay.compare import PolicySpec, UnknownPolicy, play_policy
from kvproxy.lab.replay.options import add_arguments
from kvproxy.lab.replay.results import ReplayOutcome, summarize_outcomes
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace
from tests.lab.replay.traces import chat_trace, lines, shared_prefix_trace

TWO_FOR_TWO = ReplayFleet(instances=4, prefill=2)


def play(text: str, *, fleet: ReplayFleet = TWO_FOR_TWO, trace: Trace | None = None) -> Sequence[ReplayOutcome]:
    spec = PolicySpec.parse(text)
    trace = trace or shared_prefix_trace()
    return play_policy(trace, Pace(), fleet, spec.make(rng=Random(1)), spec)


@pytest.mark.parametrize("policy", ["round_robin", "lmetric", "least_ttft", "kv_aware", "kv_aware+no_queue"])
@pytest.mark.parametrize("trace", [shared_prefix_trace(), chat_trace()], ids=["open", "closed"])
def test_requests_are_answered_by_decoders_alone(policy: str, trace: Trace) -> None:
    """Each once, in order of time, and prefilled by an engine that prefills, if apart."""
    outcomes = play(policy, trace=trace)
    assert len(outcomes) == trace.requests
    for one in outcomes:
        assert one.first_token_at is not None
        assert one.finished_at is not None
        assert one.arrived_at < one.first_token_at <= one.finished_at
        assert one.endpoint in (2, 3)
        assert one.prefilled_at in (-1, 0, 1)


@pytest.mark.parametrize(("rule", "least", "most"), [("never", 0.0, 0.0), ("always", 1.0, 1.0), ("llm_d", 0.5, 1.0)])
def test_a_rule_decides_in_place_of_the_expected_first_token(rule: str, least: float, most: float) -> None:
    outcomes = play(f"kv_aware+apart={rule}")
    share = sum(one.prefilled_at >= 0 for one in outcomes) / len(outcomes)
    assert least <= share <= most


def test_the_choice_is_some_prompts_apart_and_some_not() -> None:
    """Where decoders are busy; by itself, and by the name of the proxy's rule alike."""
    trace = shared_prefix_trace(gap_ms=50)
    outcomes = play("kv_aware", trace=trace)
    apart = sum(one.prefilled_at >= 0 for one in outcomes)
    assert 0 < apart < len(outcomes)
    assert outcomes == play("kv_aware+apart=chosen", trace=trace)


def test_a_short_prompt_is_computed_where_it_is_answered_by_dynamos_rule() -> None:
    """Prompts of 3,272 tokens of which less than 2,048 are missing and those are less than 0.7 stay."""
    by_rule = {rule: sum(one.prefilled_at >= 0 for one in play(f"kv_aware+apart={rule}")) for rule in RULES}
    assert 0 < by_rule["dynamo"] < by_rule["llm_d"] <= by_rule["always"]


def test_pulled_tokens_count_as_computed_at_the_prefiller() -> None:
    """The share of cached tokens is no larger than with engines that do both, and decoders computed nothing."""
    trace = shared_prefix_trace()
    apart = summarize_outcomes(play("kv_aware+apart=always"), 4)
    together = summarize_outcomes(play("kv_aware", fleet=ReplayFleet(instances=4)), 4)
    assert 0 < apart.hit_rate <= trace.hit_ceiling()
    assert apart.hit_rate == pytest.approx(together.hit_rate, abs=0.1)
    assert apart.imbalance >= 2.0  # two of four engines have all of it


def test_engines_that_do_both_prefill_for_each_other() -> None:
    """With 0 that prefill alone."""
    outcomes = play("kv_aware+apart=always", fleet=ReplayFleet(instances=3, prefill=0))
    assert {one.endpoint for one in outcomes} == {0, 1, 2}
    apart = [one for one in outcomes if one.prefilled_at >= 0]
    assert apart
    assert all(one.prefilled_at != one.endpoint for one in apart)


def test_without_roles_nothing_is_played_apart() -> None:
    assert all(one.prefilled_at == -1 for one in play("kv_aware", fleet=ReplayFleet(instances=2)))


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(UnknownPolicy, match=r"no rule 'x' .*known: chosen, never, always, dynamo, llm_d"):
        PolicySpec.parse("kv_aware+apart=x")


def test_engines_that_join_do_not_prefill_for_others() -> None:
    with pytest.raises(ValueError, match="none joins or leaves"):
        ReplayFleet(instances=2, prefill=1, leaves=((0, 0.5),))


def replay(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command on a small trace: exit status, output and errors."""
    file = folder / "small.jsonl"
    rows = [
        {"timestamp": 400 * number, "input_length": 1500, "output_length": 8, "hash_runs": [100 * number, 23]}
        for number in range(6)
    ]
    file.write_text("\n".join(lines(*rows, block_size=64)))
    out, err = io.StringIO(), io.StringIO()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    status = run(parser.parse_args([str(file), *arguments]), out=out, err=err)
    return status, out.getvalue(), err.getvalue()


def test_the_command_has_both_numbers(tmp_path: Path) -> None:
    """The title names them, the rows are the rules."""
    policies = "kv_aware,kv_aware+apart=always"
    status, table, errors = replay(tmp_path, "--prefill", "1", "--decode", "2", "--policy", policies)
    assert status == 0, errors
    assert ", 3 instances (1 prefill), load 0.7" in table
    assert [line.split()[0] for line in table.splitlines()[2:4]] == policies.split(",")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill", "1"), "go together"),
        (("--decode", "1"), "go together"),
        (("--prefill", "1", "--decode", "0"), "go together"),
        (("--prefill", "-1", "--decode", "1"), "go together"),
        (("--policy", "kv_aware+apart=always"), "add --prefill N --decode M"),
        (("--prefill", "1", "--decode", "1", "--routers", "2"), "none of --routers"),
        (("--prefill", "1", "--decode", "1", "--policy", "kv_aware+move"), "+move"),
        (("--prefill", "1", "--decode", "1", "--policy", "places=2"), "rules of sessions"),
        (("--prefill", "1", "--decode", "1", "--leave", "0:0.5"), "none joins or leaves"),
        (("--prefill", "1", "--decode", "1", "--url", "http://127.0.0.1:9"), "are of virtual time"),
    ],
)
def test_a_wrong_option_is_an_error_message(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    status, table, errors = replay(tmp_path, *arguments)
    assert (status, table) == (1, "")
    assert message in errors
