"""Targets of routing against the results of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.routing_cells import OURS, SCENARIO_PEERS
from benchmarks.routing_ratios import REFERENCE, Row, of_policy, ratio
from kvproxy.lab.replay.results import Ratio

#: (policy, against, mean TTFT at most) over all cells of the grid.
MEAN_TARGETS = (
    ("kv_aware", "lmetric", 0.78),
    ("kv_aware", "least_ttft", 0.87),
    ("kv_aware+priority", "lmetric", 0.70),
    ("kv_aware+priority", "least_ttft", 0.78),
    ("kv_aware+priority", "lmetric", 0.67),
    ("kv_aware", "dynamo", 0.42),
    ("kv_aware+priority", "dynamo", 0.38),
)
P99_TARGET = 1.00
SCENARIO_MEAN, SCENARIO_P99, SCENARIO_ITL = 1.05, 1.15, 1.10
#: The rare long prompts wait for each other on one engine, so that the many short ones need not wait for them.
P99_EXCEPTED = "bimodal"


class Verdict(NamedTuple):
    """One target."""

    what: str
    limit: float
    found: Ratio
    where: str = ""
    pooled: str = ""  # the same against the pooled reference

    def row(self) -> str:
        """Of the table."""
        if not self.found.value:
            return f"| {self.what} | {self.limit:.2f} | - | not run | |"
        over = self.found.value / self.limit - 1
        verdict = "reached" if over <= 0 else f"**missed by {100 * over:.0f} %**"
        return f"| {self.what} | {self.limit:.2f} | {self.found}{self.where} | {verdict} | {self.pooled} |"


def table(grid: Sequence[Row], scenarios: Sequence[Row]) -> list[str]:
    """Every target with what was found."""
    lines = ["| target | at most | found | | of the pooled reference: at most, found |", "|---|---|---|---|---|"]
    return lines + [verdict.row() for verdict in (*_grid(grid), *_scenarios(scenarios))]


def _grid(grid: Sequence[Row]) -> Iterator[Verdict]:
    for policy, against, limit in MEAN_TARGETS:
        asked = limit * ratio(grid, against, REFERENCE, "ttft_mean_s").value
        pooled = f"{asked:.2f}, {ratio(grid, policy, REFERENCE, 'ttft_mean_s').value:.2f}"
        found = ratio(grid, policy, against, "ttft_mean_s")
        yield Verdict(f"{policy}: mean TTFT of {against}", limit, found, pooled=pooled)
    for policy in ("kv_aware", "kv_aware+priority"):
        worst = max(p99_by_trace(grid, policy), key=lambda each: each[0].value, default=(Ratio(0.0), "", ""))
        found, trace, peer = worst
        what = f"{policy}: p99 TTFT of the best other policy, worst trace"
        yield Verdict(what, P99_TARGET, found, f" ({trace}, {peer})")


def p99_by_trace(grid: Sequence[Row], policy: str) -> Iterator[tuple[Ratio, str, str]]:
    """Against whichever policy that is not ours has the lowest p99 on each trace."""
    for trace in dict.fromkeys(row["trace"] for row in grid):
        rows = [row for row in grid if row["trace"] == trace]
        others = dict.fromkeys(row["policy"] for row in rows if row["policy"] not in OURS)
        if others:
            found = [(ratio(rows, policy, other, "ttft_p99_s"), trace, other) for other in others]
            yield max(found, key=lambda each: each[0].value)


def best_peer(rows: Sequence[Row], figure: str) -> str:
    """Return the policy of other routers that is best in this figure, over all seeds of one scenario."""
    found = {name: of_policy(rows, name) for name in SCENARIO_PEERS}
    means = {name: sum(row[figure] for row in each) / len(each) for name, each in found.items() if each}
    return min(means, key=means.__getitem__) if means else ""


def worst_scenario(rows: Sequence[Row], policy: str, figure: str, *, but: str = "") -> tuple[Ratio, str]:
    """Where this policy stands worst against the best peer, and the scenario's name."""
    found = []
    for name in dict.fromkeys(row["trace"] for row in of_policy(rows, policy)):
        mine = [row for row in rows if row["trace"] == name]
        if name != but:
            found.append((ratio(mine, policy, best_peer(mine, figure), figure), str(name)))
    return max(found, key=lambda each: each[0].value, default=(Ratio(0.0), ""))


def _scenarios(rows: Sequence[Row]) -> Iterator[Verdict]:
    for policy in ("kv_aware", "kv_aware+priority"):
        found, name = worst_scenario(rows, policy, "ttft_mean_s")
        yield Verdict(f"{policy}: mean TTFT of the best peer, worst scenario", SCENARIO_MEAN, found, f" ({name})")
        found, name = worst_scenario(rows, policy, "ttft_p99_s", but=P99_EXCEPTED)
        what = f"{policy}: p99 TTFT of the best peer, worst scenario but {P99_EXCEPTED}"
        yield Verdict(what, SCENARIO_P99, found, f" ({name})")
    hot = [row for row in rows if row["trace"] == "hot_prompt"]
    found = ratio(hot, "kv_aware", best_peer(hot, "itl_p99_s"), "itl_p99_s")
    yield Verdict("kv_aware: ITL p99 of the best peer, hot_prompt", SCENARIO_ITL, found)
