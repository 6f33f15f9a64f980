"""Metrics pages of several processes as one.

Counters and histograms are summed and never fall: those of a process that ended still count. Gauges are merged by a
rule of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvproxy.base.metrics.across_workers import Across, rule_of

_COMBINE: Mapping[Across, Callable[[Sequence[float]], float]] = {
    Across.SUM: sum,
    Across.MAX: max,
    Across.MIN: min,
    Across.MEAN: lambda values: sum(values) / len(values),
    Across.REST: lambda values: max(0.0, sum(values) - len(values) + 1),
}


def combine_values(rule: Across, values: Sequence[float]) -> float:
    """One value of several."""
    return _COMBINE[rule](values)


class Family:
    """One metric of a page: its values by series, in the order they were written."""

    __slots__ = ("documentation", "kind", "name", "series")

    def __init__(self, name: str, kind: str = "untyped", documentation: str = "") -> None:
        self.name = name
        self.kind = kind
        self.documentation = documentation
        self.series: dict[str, float] = {}


Page = dict[str, Family]


def parse_page(text: str) -> Page:
    """Families by name, of a page in the text format as kvproxy writes it: heads first, no timestamps."""
    page: Page = {}
    family = Family("")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, documentation = line[7:].partition(" ")
            family = page.setdefault(name, Family(name, documentation=documentation))
        elif line.startswith("# TYPE "):
            name, _, kind = line[7:].partition(" ")
            family = page.setdefault(name, Family(name))
            family.kind = kind
        elif line:
            series, _, value = line.rpartition(" ")
            family.series[series] = float(value)
    return page


def add_pages(pages: Iterable[Page], rules: Mapping[str, Across]) -> Page:
    """One page of all, its gauges by the rules."""
    values: dict[str, dict[str, list[float]]] = {}
    heads: dict[str, Family] = {}
    for page in pages:
        for name, family in page.items():
            heads.setdefault(name, family)
            into = values.setdefault(name, {})
            for series, value in family.series.items():
                into.setdefault(series, []).append(value)
    merged: Page = {}
    for name, head in heads.items():
        rule = rule_of(name, head.kind, rules)
        family = merged[name] = Family(name, head.kind, head.documentation)
        family.series = {series: combine_values(rule, several) for series, several in values[name].items()}
    return merged


def keep_counts(page: Page) -> Page:
    """Keep what still counts after a process ended: its counters and histograms."""
    return {name: family for name, family in page.items() if family.kind != "gauge"}


def write_page(page: Page) -> bytes:
    """Return the text of it."""
    parts: list[str] = []
    for family in page.values():
        parts.append(f"# HELP {family.name} {family.documentation}\n# TYPE {family.name} {family.kind}\n")
        parts += [f"{series} {_number(value)}\n" for series, value in family.series.items()]
    return "".join(parts).encode()


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
