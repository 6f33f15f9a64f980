"""How the figures of several processes become one, without a label for the process: counters and histograms are
summed, a gauge has a rule of its own."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Across(StrEnum):
    """How one gauge's values from several processes are combined."""

    SUM = "sum"  # each process has its own share
    MAX = "max"  # all measure the same thing; the highest counts
    MIN = "min"  # likewise, but the lowest counts
    MEAN = "mean"  # ratios, and estimates that each process learned by itself
    REST = "rest"  # the remainder that no process claims


def rule_of(name: str, kind: str, rules: Mapping[str, Across]) -> Across:
    """How the series of a metric become one; `name` and `kind` as in the exposition. Gauges without a rule are
    summed."""
    return rules.get(name, Across.SUM) if kind == "gauge" else Across.SUM
