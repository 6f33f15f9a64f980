"""The routing figures as Markdown: ratios as geometric means over cells, against what they are to reach."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

#: (policy, against, figure, at most): "bound" is the pooled cache's mean.
TARGETS = (
    ("kv_aware", "dynamo", "ttft_mean_s", 0.40),
    ("kv_aware", "lmetric", "ttft_mean_s", 0.90),
    ("kv_aware", "least_ttft", "ttft_mean_s", 0.92),
    ("kv_aware", "lmetric", "ttft_p99_s", 1.00),
    ("kv_aware", "bound", "ttft_mean_s", 1.30),
    ("kv_aware+queue", "dynamo", "ttft_mean_s", 0.36),
    ("kv_aware+queue", "lmetric", "ttft_mean_s", 0.82),
    ("kv_aware+queue", "least_ttft", "ttft_mean_s", 0.85),
    ("kv_aware+queue", "bound", "ttft_mean_s", 1.20),
)

#: (variant, against policy, against variant, traces or all, at most): mean TTFT of kv_aware.
VARIANT_TARGETS = (
    ("events 500 ms late", "kv_aware", "", (), 1.02),
    ("approximate index", "kv_aware", "", (), 1.05),
    ("approximate index told a quarter of the capacity", "kv_aware",
     "approximate index of a quarter of the capacity, fixed", (), 0.90),
    ("approximate index told four times the capacity", "kv_aware",
     "approximate index of four times the capacity, fixed", (), 1.00),
    ("priors 4x too fast", "kv_aware", "", (), 1.03),
    ("priors 4x too slow", "kv_aware", "", (), 1.03),
    ("half the fleet at 0.4x", "lmetric", "half the fleet at 0.4x", (), 0.85),
    ("one endpoint 3x slower in the middle third", "kv_aware", "one endpoint 3x slower in the middle third, known",
     (), 1.03),
    ("20 % of entries false", "kv_aware", "", ("agent_dev",), 1.20),
)  # fmt: skip


def as_markdown(rows: Sequence[Row], *, command: str) -> str:
    """The whole report."""
    plain = [row for row in rows if not row["variant"]]
    parts = [
        "# Routing policies on real traces, in virtual time",
        "",
        f"`{command}` ({platform.machine()}, Python {platform.python_version()}; virtual time does not depend on the "
        "machine). Traces, engine model and what load means: benchmarks/traces/README.md. Speeds are learned from "
        "first tokens, nothing is told. Times in seconds.",
        "",
        "## What was to be reached",
        "",
        *_targets(plain),
        *_variant_targets(rows),
        "",
        "## Geometric means over traces, instances and loads",
        "",
        *_overview(plain),
        "",
        "## By trace (mean TTFT against the pooled-cache bound, geometric mean)",
        "",
        *_by_trace(plain),
        "",
        "## Every cell (mean / p99 TTFT)",
        "",
        *_cells(plain),
        "",
        "## Disturbed (8 instances, load 0.7; mean TTFT against the undisturbed run)",
        "",
        *_variants(rows),
        "",
    ]
    return "\n".join(parts)


def _targets(plain: Sequence[Row]) -> list[str]:
    lines = ["| policy | against | figure | at most | found | |", "|---|---|---|---|---|---|"]
    for policy, against, figure, limit in TARGETS:
        found = _ratio(plain, policy, against, figure)
        name = "mean TTFT" if figure == "ttft_mean_s" else "p99 TTFT"
        lines.append(f"| {policy} | {against} | {name} | {limit:.2f} | {found:.3f} | {_verdict(found, limit)} |")
    return lines


def _variant_targets(rows: Sequence[Row]) -> list[str]:
    lines = []
    for variant, policy, other, traces, limit in VARIANT_TARGETS:
        found = _variant_ratio(rows, variant, policy, other, traces)
        what = f"kv_aware, {variant}" + (f" ({', '.join(traces)})" if traces else "")
        against = f"{policy}, {other or 'undisturbed'}"
        lines.append(f"| {what} | {against} | mean TTFT | {limit:.2f} | {found:.3f} | {_verdict(found, limit)} |")
    return lines


def _overview(plain: Sequence[Row]) -> list[str]:
    against = ("dynamo", "lmetric", "least_ttft", "bound")
    lines = ["| policy | " + " | ".join(f"mean vs {name} | p99 vs {name}" for name in against) + " | hit rate |"]
    lines.append("|---" * (2 * len(against) + 2) + "|")
    for policy in _policies(plain):
        figures = [
            f"{_ratio(plain, policy, name, figure):.2f}" for name in against for figure in ("ttft_mean_s", "ttft_p99_s")
        ]
        hits = [row["hit_rate"] for row in plain if row["policy"] == policy]
        lines.append(f"| {policy} | " + " | ".join(figures) + f" | {sum(hits) / len(hits):.3f} |")
    return lines


def _by_trace(plain: Sequence[Row]) -> list[str]:
    traces = list(dict.fromkeys(row["trace"] for row in plain))
    lines = ["| policy | " + " | ".join(traces) + " |", "|---" * (len(traces) + 1) + "|"]
    for policy in _policies(plain):
        ratios = [_ratio([r for r in plain if r["trace"] == name], policy, "bound", "ttft_mean_s") for name in traces]
        lines.append(f"| {policy} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return lines


def _cells(plain: Sequence[Row]) -> list[str]:
    policies = _policies(plain)
    lines = ["| trace | N | load | bound | " + " | ".join(policies) + " |", "|---" * (len(policies) + 4) + "|"]
    for key, group in _grouped(plain, _cell).items():
        by_policy = {row["policy"]: row for row in group}
        first = group[0]
        figures = [f"{by_policy[name]['ttft_mean_s']:.3f} / {by_policy[name]['ttft_p99_s']:.2f}" for name in policies]
        bound = f"{first['bound_ttft_mean_s']:.3f} / {first['bound_ttft_p99_s']:.2f}"
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {bound} | " + " | ".join(figures) + " |")
    return lines


def _variants(rows: Sequence[Row]) -> list[str]:
    disturbed = [row for row in rows if row["variant"]]
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    lines = ["| what | policy | " + " | ".join(traces) + " | all |", "|---" * (len(traces) + 3) + "|"]
    for variant, policy in dict.fromkeys((row["variant"], row["policy"]) for row in disturbed):
        mine = [row for row in rows if row["policy"] == policy]
        ratios = [_variant_ratio(mine, variant, policy, "", (trace,), policy) for trace in traces]
        ratios.append(_variant_ratio(mine, variant, policy, "", (), policy))
        lines.append(f"| {variant} | {policy} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return lines


def _variant_ratio(
    rows: Sequence[Row], variant: str, policy: str, other: str, traces: Sequence[str], subject: str = "kv_aware"
) -> float:
    """The subject's mean TTFT under `variant` against that of `policy` under `other`, cell by cell."""
    base = {_cell(row): row["ttft_mean_s"] for row in rows if (row["policy"], row["variant"]) == (policy, other)}
    return _geometric_mean(
        row["ttft_mean_s"] / base[_cell(row)]
        for row in rows
        if (row["policy"], row["variant"]) == (subject, variant)
        and (not traces or row["trace"] in traces)
        and _cell(row) in base
    )


def _ratio(plain: Sequence[Row], policy: str, against: str, figure: str) -> float:
    if against == "bound":
        return _geometric_mean(row[figure] / row[f"bound_{figure}"] for row in plain if row["policy"] == policy)
    base = {_cell(row): row[figure] for row in plain if row["policy"] == against}
    return _geometric_mean(
        row[figure] / base[_cell(row)] for row in plain if row["policy"] == policy and _cell(row) in base
    )


def _verdict(found: float, limit: float) -> str:
    return "reached" if 0.0 < found <= limit else f"missed by {100 * (found / limit - 1):.0f} %"


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _cell(row: Row) -> tuple[str, int, float]:
    return (row["trace"], row["instances"], row["load"])


def _grouped(rows: Sequence[Row], key: Callable[[Row], tuple[str, int, float]]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0
