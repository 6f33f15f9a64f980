"""The routing figures as Markdown: the answer first, then what it is made of."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from benchmarks import routing_targets
from benchmarks.routing_cells import ONLY_AT_EIGHT, OURS, REQUESTS, SCENARIO_PEERS, TRACES, VARIANTS, distinct
from benchmarks.routing_ratios import REFERENCE, Row, cell_of, of_policy, ratio, variant_ratio
from benchmarks.routing_targets import best_peer, worst_scenario
from kvproxy.lab.replay.scenarios import SCENARIOS

#: (variant, against which other, traces or all, at most): mean TTFT of kv_aware.
VARIANT_TARGETS = (
    ("events 500 ms late", "", (), 1.02),
    ("approximate index", "", (), 1.05),
    ("approximate index told a quarter of the capacity", "approximate index of a quarter of the capacity, fixed",
     (), 0.90),
    ("approximate index told four times the capacity", "approximate index of four times the capacity, fixed", (), 1.00),
    ("priors 4x too fast", "", (), 1.03),
    ("priors 4x too slow", "", (), 1.03),
    ("one endpoint 3x slower in the middle third", "one endpoint 3x slower in the middle third, known", (), 1.03),
)  # fmt: skip

_FIGURES = (
    ("TTFT mean", "ttft_mean_s"), ("p50", "ttft_p50_s"), ("p90", "ttft_p90_s"), ("p99", "ttft_p99_s"),
    ("longest", "ttft_max_s"), ("e2e", "e2e_mean_s"), ("e2e p99", "e2e_p99_s"), ("TPOT", "tpot_mean_s"),
    ("TPOT p99", "tpot_p99_s"), ("ITL p99", "itl_p99_s"), ("session", "session_mean_s"),
)  # fmt: skip


def as_markdown(rows: Sequence[Row], *, command: str, wanted: int) -> str:
    """Render the whole report."""
    scenarios = [row for row in rows if row["trace"] in SCENARIOS]
    traces = [row for row in rows if row["trace"] not in SCENARIOS]
    grid = [row for row in traces if not row["variant"]]
    parts = [
        "# Routing policies on request traces and scenarios, in virtual time",
        "",
        *_answer(grid, scenarios),
        "",
        "## Targets",
        "",
        *routing_targets.table(grid, scenarios),
        "",
        *_method(rows, grid, scenarios, command, wanted),
        "",
        "## Traces: geometric means over all cells",
        "",
        *_overview(grid),
        "",
        "## Traces: mean TTFT of lmetric's, by fleet size and load",
        "",
        *_by_size(grid),
        "",
        "## Traces: other figures against lmetric's",
        "",
        *_all_figures(grid),
        "",
        "## Traces: one by one",
        "",
        *_by_trace(grid),
        "",
        "## Scenarios: ours against the best peer in each figure",
        "",
        *_scenarios(scenarios),
        "",
        "## Scenarios: mean / p99 TTFT in s",
        "",
        *_cells(scenarios),
        "",
        "## Disturbed knowledge: kv_aware's mean TTFT, 8 instances, load 0.7",
        "",
        *_variants(traces),
        "",
        "## Every cell: mean / p99 TTFT in s",
        "",
        *_cells(grid),
        "",
    ]
    return "\n".join(parts)


def _answer(grid: Sequence[Row], scenarios: Sequence[Row]) -> list[str]:
    lines = [
        "Mean TTFT, geometric mean over traces, fleet sizes and loads, and the worst of the scenarios:",
        "",
        f"| | {' | '.join(f'of {name}' for name in _SHOWN)} | e2e of lmetric | worst scenario: mean | p99 |",
        "|---" * 8 + "|",
    ]
    for policy in OURS:
        found = [ratio(grid, policy, name, "ttft_mean_s") for name in _SHOWN]
        found.append(ratio(grid, policy, "lmetric", "e2e_mean_s"))
        worst = [_worst(scenarios, policy, figure) for figure in ("ttft_mean_s", "ttft_p99_s")]
        lines.append(f"| {policy} | " + " | ".join([*map(str, found), *worst]) + " |")
    return [*lines, "", "Below 1 is better. ± is the standard error over seeds. A peer is the best of "
            f"{', '.join(SCENARIO_PEERS)} in that figure."]  # fmt: skip


_SHOWN = ("lmetric", "least_ttft", "dynamo", "dynamo_agentic")


def _worst(scenarios: Sequence[Row], policy: str, figure: str) -> str:
    found, name = worst_scenario(scenarios, policy, figure)
    return f"{found} ({name})" if name else "-"


def _by_scenario(scenarios: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        name: [row for row in scenarios if row["trace"] == name] for name in distinct([r["trace"] for r in scenarios])
    }


def _method(rows: Sequence[Row], grid: Sequence[Row], scenarios: Sequence[Row], command: str, wanted: int) -> list[str]:
    took_s = sum(row["took_s"] + row["reference_took_s"] for row in rows)
    twice = sum(1 for row in grid if row["seed"] > 1), sum(1 for row in scenarios if row["seed"] > 1)
    return [
        "## How",
        "",
        f"`{command}`: {len(rows)} of {wanted} runs, {took_s / 60:.0f} minutes of one core, "
        f"kept references not counted ({platform.machine()}, "
        f"Python {platform.python_version()}; virtual time does not depend on the machine).",
        "",
        "- Everything here is on the **report half** of each trace, and of each scenario's draws; newer constants were "
        "tuned on the other ([traces](../traces/README.md#halves)), those from before there were halves on whole "
        "development traces.",
        f"- Traces: {len(distinct([cell_of(row) for row in grid]))} cells, at most {REQUESTS:,} requests in each. "
        "Engines: 2,048 tokens a step, 256 sequences, blocks as in the trace. "
        f"{' and '.join(ONLY_AT_EIGHT)} were run with 8 instances only.",
        f"- Seeds move arrivals. {twice[0]} runs on traces (8 instances) and {twice[1]} on scenarios are "
        "a second seed's; a cell that was run once is taken to scatter as those do.",
        "- Speeds are learned from first tokens, nothing is told. The pooled reference is a greedy policy over one "
        "cache that all engines share: no bound, it can be beaten. Load 1.0 is its saturated throughput.",
        "- Reports until November 2026 were on whole traces with arrivals as recorded, longer runs, and a Dynamo that "
        "counted shared blocks once a request: their figures are not comparable with these.",
        "- `+priority`: engines that schedule by priority as vLLM does, and get it from the router; `+no_queue`: "
        "without the router queue, which `kv_aware` has by itself.",
    ]


def _overview(grid: Sequence[Row]) -> list[str]:
    against = (*_SHOWN, REFERENCE)
    lines = [
        "| policy | " + " | ".join(f"mean of {name} | p99" for name in against) + " | goodput | hit | busiest/mean |"
    ]
    lines.append("|---" * (2 * len(against) + 4) + "|")
    for policy in distinct([row["policy"] for row in grid]):
        mine = of_policy(grid, policy)
        found = [str(ratio(grid, policy, name, f)) for name in against for f in ("ttft_mean_s", "ttft_p99_s")]
        means = [sum(row[f] for row in mine) / len(mine) for f in ("goodput", "hit_rate", "imbalance")]
        lines.append(f"| {policy} | " + " | ".join([*found, *(f"{mean:.3f}" for mean in means)]) + " |")
    return lines


def _by_size(grid: Sequence[Row]) -> list[str]:
    kinds = sorted({(row["instances"], row["load"]) for row in grid})
    lines = [
        "| policy | " + " | ".join(f"{n} at {load:g}" for n, load in kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for policy in distinct([row["policy"] for row in grid]):
        found = [
            ratio([row for row in grid if (row["instances"], row["load"]) == kind], policy, "lmetric", "ttft_mean_s")
            for kind in kinds
        ]
        lines.append(f"| {policy} | " + " | ".join(f"{each.value:.3f}" if each.value else "-" for each in found) + " |")
    return lines


def _all_figures(grid: Sequence[Row]) -> list[str]:
    lines = ["| policy | " + " | ".join(title for title, _ in _FIGURES) + " | fairness |"]
    lines.append("|---" * (len(_FIGURES) + 2) + "|")
    for policy in distinct([row["policy"] for row in grid]):
        found = [f"{ratio(grid, policy, 'lmetric', figure).value:.3f}" for _, figure in _FIGURES]
        mine = of_policy(grid, policy)
        fairness = sum(row["fairness"] for row in mine) / len(mine)
        lines.append(f"| {policy} | " + " | ".join([*found, f"{fairness:.2f}"]) + " |")
    return lines


def _by_trace(grid: Sequence[Row]) -> list[str]:
    names = [name for name in TRACES if any(row["trace"] == name for row in grid)]
    lines = ["Mean TTFT of the pooled reference's, and p99 of the best other policy's:", ""]
    lines += ["| policy | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for policy in distinct([row["policy"] for row in grid]):
        found = [ratio([r for r in grid if r["trace"] == name], policy, REFERENCE, "ttft_mean_s") for name in names]
        lines.append(f"| {policy} | " + " | ".join(map(str, found)) + " |")
    for policy in OURS:
        worst = {trace: f"{found} ({other})" for found, trace, other in routing_targets.p99_by_trace(grid, policy)}
        lines.append(f"| {policy}, p99 | " + " | ".join(worst.get(name, "-") for name in names) + " |")
    return lines


def _scenarios(scenarios: Sequence[Row]) -> list[str]:
    figures = (("mean", "ttft_mean_s"), ("p99", "ttft_p99_s"), ("e2e", "e2e_mean_s"), ("TPOT p99", "tpot_p99_s"),
               ("ITL p99", "itl_p99_s"))  # fmt: skip
    lines = ["| scenario | load | policy | " + " | ".join(title for title, _ in figures) + " | goodput, best peer's |"]
    lines.append("|---" * (len(figures) + 4) + "|")
    for name, rows in _by_scenario(scenarios).items():
        ours = [policy for policy in distinct([row["policy"] for row in rows]) if policy.startswith("kv_aware")]
        for policy in ours:
            found = []
            for _, figure in figures:
                peer = best_peer(rows, figure)
                found.append(f"{ratio(rows, policy, peer, figure)} {peer}")
            good = {each: _mean(of_policy(rows, each), "goodput") for each in (*SCENARIO_PEERS, policy)}
            best = max(good[each] for each in SCENARIO_PEERS)
            label = f"{name} | {rows[0]['load']:g}" if policy == ours[0] else " | "
            lines.append(f"| {label} | {policy} | " + " | ".join(found) + f" | {good[policy]:.3f}, {best:.3f} |")
    return [*lines, "", *(f"- {each.name}: {each.what}" for each in SCENARIOS.values())]


def _mean(rows: Sequence[Row], figure: str) -> float:
    return sum(row[figure] for row in rows) / len(rows) if rows else 0.0


def _cells(rows: Sequence[Row]) -> list[str]:
    policies = distinct([row["policy"] for row in rows])
    lines = [
        "| | N | load | seeds | pooled reference | " + " | ".join(policies) + " |",
        "|---" * (len(policies) + 5) + "|",
    ]
    for key in distinct([cell_of(row) for row in rows]):
        group = [row for row in rows if cell_of(row) == key]
        shown = []
        for policy in policies:
            mine = of_policy(group, policy)
            text = f"{_mean(mine, 'ttft_mean_s'):.3f} / {_mean(mine, 'ttft_p99_s'):.2f}" if mine else "-"
            shown.append(text)
        reference = group[0]["reference"]
        seeds = max(row["seed"] for row in group)
        pooled = f"{reference['ttft_mean_s']:.3f} / {reference['ttft_p99_s']:.2f}"
        lines.append(f"| {key[0]} | {key[1]} | {key[2]:g} | {seeds} | {pooled} | " + " | ".join(shown) + " |")
    return lines


def _variants(traces: Sequence[Row]) -> list[str]:
    rows = [r for r in of_policy(traces, "kv_aware") if r["instances"] == 8 and r["load"] == 0.7 and r["seed"] == 1]
    present = {row["variant"] for row in rows}
    lines = ["| what | against | at most | found | |", "|---|---|---|---|---|"]
    for variant, other, names, limit in VARIANT_TARGETS:
        if variant in present and variant in VARIANTS:
            found = variant_ratio(rows, variant, other, names).value
            verdict = "reached" if found <= limit else f"missed by {100 * (found / limit - 1):.0f} %"
            lines.append(f"| {variant} | {other or 'undisturbed'} | {limit:.2f} | {found:.3f} | {verdict} |")
    return lines
