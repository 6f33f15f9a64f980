"""Ratios of figures over cells and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvproxy.lab.replay.results import Ratio, mean_ratio

Row = Mapping[str, Any]

#: Instead of a policy: the pooled reference of the cell.
REFERENCE = "pooled reference"


def of_policy(rows: Sequence[Row], policy: str) -> list[Row]:
    """Its rows."""
    return [row for row in rows if row["policy"] == policy]


def cell_of(row: Row) -> tuple[str, int, float]:
    """Return the group within which policies are compared."""
    return row["trace"], row["instances"], row["load"]


def ratio(rows: Sequence[Row], policy: str, against: str, figure: str) -> Ratio:
    """Of one policy's figure to another's, cell by cell and seed by seed."""
    base = {(*cell_of(row), row["seed"]): row[figure] for row in of_policy(rows, against)}
    cells: dict[tuple[str, int, float], list[tuple[float, float]]] = {}
    for row in of_policy(rows, policy):
        other = row["reference"][figure] if against == REFERENCE else base.get((*cell_of(row), row["seed"]))
        if other is not None:
            cells.setdefault(cell_of(row), []).append((row[figure], other))
    return mean_ratio(cells.values())


def variant_ratio(rows: Sequence[Row], variant: str, other: str, traces: Sequence[str] = ()) -> Ratio:
    """Return the mean TTFT of kv_aware under one variant against another."""
    base = {(*cell_of(row), row["seed"]): row["ttft_mean_s"] for row in rows if row["variant"] == other}
    pairs = [
        [(row["ttft_mean_s"], base[(*cell_of(row), row["seed"])])]
        for row in rows
        if row["variant"] == variant and (*cell_of(row), row["seed"]) in base
        if not traces or row["trace"] in traces
    ]
    return mean_ratio(pairs)
