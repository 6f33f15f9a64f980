"""The routing benchmark's report: ratios, the best peer, what was reached."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import routing_defaults, routing_report, routing_targets
from benchmarks.routing_cells import OURS, Cell, cells
from benchmarks.routing_ratios import REFERENCE, ratio
from kvproxy.lab.replay.results import ReplayOutcome, summarize_outcomes
from kvproxy.lab.replay.scenarios import SCENARIOS

PLAIN = asdict(summarize_outcomes([ReplayOutcome(0.0, 100, 0, first_token_at=1.0, finished_at=2.0)], 1))


def row(policy: str, ttft: float, p99: float = 1.0, *, trace: str = "conv_dev", seed: int = 1) -> dict[str, Any]:
    """Return a run."""
    return {
        **asdict(Cell(trace, 8, 0.9, policy, seed=seed)), **PLAIN, "ttft_mean_s": ttft, "ttft_p99_s": p99,
        "reference": {"ttft_mean_s": 2.0, "ttft_p99_s": 4.0}, "took_s": 1.0, "reference_took_s": 1.0,
    }  # fmt: skip


def test_ratios_are_seed_by_seed() -> None:
    """A seed that only one of them was run with does not count."""
    rows = [row("kv_aware", 1.0), row("lmetric", 2.0), row("kv_aware", 1.0, seed=2), row("kv_aware", 9.0, seed=3),
            row("lmetric", 2.0, seed=2)]  # fmt: skip
    assert ratio(rows, "kv_aware", "lmetric", "ttft_mean_s") == (pytest.approx(0.5), pytest.approx(0.0))
    assert ratio(rows, "lmetric", REFERENCE, "ttft_mean_s").value == pytest.approx(1.0)
    assert ratio(rows, "kv_aware", "nothing", "ttft_mean_s").value == 0.0


def test_p99_is_held_against_whichever_other_is_best() -> None:
    """On each trace; ours are no others."""
    rows = [row("kv_aware", 1.0, 6.0), row("kv_aware+no_queue", 1.0, 1.0), row("lmetric", 1.0, 5.0),
            row("dynamo_agentic", 9.0, 4.0)]  # fmt: skip
    ((found, trace, other),) = routing_targets.p99_by_trace(rows, "kv_aware")
    assert (found.value, trace, other) == (pytest.approx(1.5), "conv_dev", "dynamo_agentic")


def test_a_target_is_relative_to_the_pooled_reference() -> None:
    """At most 0.78 of a policy at 1.5 times the reference is 1.17 of the reference."""
    table = routing_targets.table([row("kv_aware", 2.4), row("lmetric", 3.0)], [])
    assert next(line for line in table if "kv_aware: mean TTFT of lmetric" in line).endswith("| 1.17, 1.20 |")


def test_the_worst_scenario_is_named() -> None:
    """Each figure has its own best peer; one may be left out."""
    rows = [row("kv_aware", 3.0, trace="herd"), row("lmetric", 2.0, trace="herd"), row("dynamo", 4.0, trace="herd"),
            row("kv_aware", 1.0, trace="unique"), row("lmetric", 2.0, trace="unique")]  # fmt: skip
    found, name = routing_targets.worst_scenario(rows, "kv_aware", "ttft_mean_s")
    assert (found.value, name) == (pytest.approx(1.5), "herd")
    assert routing_targets.worst_scenario(rows, "kv_aware", "ttft_mean_s", but="herd")[1] == "unique"


@pytest.mark.parametrize(("found", "said"), [(1.0, "reached"), (1.5, "**missed by 92 %**")])
def test_a_target_is_reached_or_missed(found: float, said: str) -> None:
    """And says by how much."""
    table = routing_targets.table([row("kv_aware", found), row("lmetric", found / 1.5 if found > 1 else 2.0)], [])
    assert said in next(line for line in table if "kv_aware: mean TTFT of lmetric" in line)
    assert "not run" in next(line for line in table if "of dynamo" in line)


def test_a_run_that_was_cut_short_is_a_report() -> None:
    """It says how much of it there is, on which half, and what no figure is for."""
    rows = [row(policy, 1.0) for policy in (*OURS, "lmetric")]
    text = routing_report.as_markdown(rows, command="python -m benchmarks.routing", wanted=900)
    assert "5 of 900 runs" in text
    assert "report half" in text
    assert "not run" in text
    assert routing_report.as_markdown([], command="c", wanted=1).startswith("# Routing")


def test_every_cell_is_run_once() -> None:
    """All scenarios, and what is quick is a part of it."""
    everything, quick = cells(quick=False), cells(quick=True)
    assert len(set(everything)) == len(everything)
    assert set(quick) < set(everything)
    assert {cell.trace for cell in quick} >= set(SCENARIOS)


def test_defaults_are_held_against_the_best_peer_of_each_cell() -> None:
    """Each figure has its own best peer, and a cell above 1.0 is counted."""
    cells = {}
    for name, ours in (("one", 1.0), ("two", 4.0)):
        figures = {
            "kv_aware": (ours, 8.0),
            "lmetric": (2.0, 9.0),
            "least_ttft": (3.0, 4.0),
            "dynamo_agentic": (4.0, 9.0),
        }
        cells[name] = {policy: routing_defaults.Figures(mean, p99, 1.0) for policy, (mean, p99) in figures.items()}
    text = routing_defaults.as_markdown(cells, command="c", about="a")
    assert "| mean of | 1.000 | 0.667 | 0.500 | 1.000 | 1 of 2 |" in text
    assert "| p99 of | 0.889 | 2.000 | 0.889 | 2.000 | 2 of 2 |" in text
    assert "in the mean: two 2.00." in text
    assert "In the p99: one 2.00; two 2.00." in text


def test_a_cell_of_the_defaults_is_played() -> None:
    """The default and each peer, on a trace that is cut."""
    played = routing_defaults.play_cell("msyn_dev", 0.5, requests=60, seeds=1)
    assert list(played) == [routing_defaults.DEFAULT, *routing_defaults.PEERS]
    assert all(0.0 < one.mean_s <= one.p99_s < one.e2e_s * 100 for one in played.values())
