"""Names in a PromQL query: metrics, matchers, groupings, functions. Enough to hold queries against the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvproxy.operate.metrics.reference import describe_metrics

#: Labels that Prometheus adds to everything it scrapes.
SCRAPED = frozenset({"job", "instance"})
#: Every series a query may name, with its labels.
SERIES = {
    name: labels | SCRAPED
    for metrics in describe_metrics().values()
    for metric in metrics
    for name, labels in metric.series.items()
} | {"up": SCRAPED}

_FUNCTIONS = frozenset({"rate", "increase", "histogram_quantile", "vector", "deriv"})
_AGGREGATIONS = frozenset({"sum", "min", "max", "count", "avg"})
_KEYWORDS = frozenset({"by", "on", "ignoring", "group_left", "offset", "and", "or", "unless"})

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"\b([a-z_][a-z0-9_]*)(\{[^}]*\})")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|ignoring|group_left)\s*\(([^)]*)\)")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
_CALLED = re.compile(r"\b([a-z_]+)\s*\(")
_METRIC = re.compile(r"\b(kvproxy_[a-z0-9_]+|up)\b")


@dataclass(frozen=True)
class Query:
    """One query's text; `problems` says what is wrong with it."""

    text: str

    @property
    def bare(self) -> str:
        """Without the contents of strings."""
        return _STRING.sub('""', self.text)

    @property
    def metrics(self) -> list[str]:
        """Series in order of appearance."""
        return _METRIC.findall(self.bare)

    @property
    def matchers(self) -> list[tuple[str, str, str]]:
        """Series, label and value of each matcher."""
        return [
            (name, label, value)
            for name, inner in _SELECTOR.findall(self.text)
            for label, _, value in _MATCHER.findall(inner)
        ]

    @property
    def result_labels(self) -> frozenset[str]:
        """Labels that the result can have."""
        groups = _BY.findall(self.bare)
        if groups:
            return frozenset(label for group in groups for label in _names(group))
        if re.match(r"(sum|min|max|count|avg|histogram_quantile)\b", self.bare.lstrip("( ")):
            return frozenset()
        return frozenset(label for name in self.metrics for label in SERIES.get(name, ()))

    def problems(self) -> list[str]:
        """Return faults that Prometheus would refuse, or silently answer without data."""
        found = [*self._unknown(), *self._labels(), *self._types()]
        for opening, closing in ("()", "{}", "[]"):
            if self.bare.count(opening) != self.bare.count(closing):
                found.append(f"unbalanced {opening}{closing}")
        if not self.metrics:
            found.append("names no metric")
        return found

    def _unknown(self) -> Iterator[str]:
        for name in self.metrics:
            if name not in SERIES:
                yield f"no metric is called {name}"
        for name in _CALLED.findall(self.bare):
            if name not in _FUNCTIONS | _AGGREGATIONS | _KEYWORDS:
                yield f"no function is called {name}"

    def _labels(self) -> Iterator[str]:
        for name, label, _ in self.matchers:
            if name in SERIES and label not in SERIES[name]:
                yield f"{name} has no label {label}"
        grouped = {label for group in _GROUPING.findall(self.bare) for label in _names(group)}
        for name in self.metrics:
            missing = grouped - SERIES.get(name, grouped) - {"le"}
            if missing and "ignoring" not in self.bare:
                yield f"{name} cannot be grouped by {', '.join(sorted(missing))}"
        if "histogram_quantile" in self.bare and not all("le" in _names(group) for group in _BY.findall(self.bare)[:1]):
            yield "histogram_quantile needs `by (le)`"

    def _types(self) -> Iterator[str]:
        rated = set(re.findall(r"\b(?:rate|increase)\s*\((kvproxy_[a-z0-9_]+)", self.bare))
        rated |= set(re.findall(r"\b(?:rate|increase)\s*\((kvproxy_[a-z0-9_]+)\{[^}]*\}\[", self.bare))
        for name in self.metrics:
            counts = name.endswith(("_total", "_bucket", "_sum", "_count"))
            if counts and name not in rated:
                yield f"{name} only ever grows: use rate or increase"
            if name in rated and not counts:
                yield f"{name} is a gauge: it has no rate"


def _names(group: str) -> list[str]:
    return [name.strip() for name in group.split(",") if name.strip()]
