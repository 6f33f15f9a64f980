"""How several workers' values of one thing become one: rules, and rules of rules. Pure.

A rule takes the values that workers have, in the order of the workers and never none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Rule = Callable[[list[Any]], Any]

_SEVERITIES = ("problem", "error", "warning", "note", "ok")


def first(values: list[Any]) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def total(values: list[Any]) -> Any:
    """Return the sum of what is known."""
    known = known_of(values)
    return sum(known) if known else None


def largest(values: list[Any]) -> Any:
    """Return the largest of what is known."""
    return max(known_of(values), default=None)


def smallest(values: list[Any]) -> Any:
    """Return the smallest of what is known."""
    return min(known_of(values), default=None)


def mean(values: list[Any]) -> Any:
    """Return the mean of what is known."""
    known = known_of(values)
    return sum(known) / len(known) if known else None


def joined(values: list[Any]) -> list[Any]:
    """All of them, each once."""
    found: list[Any] = []
    for one in _flat(values):
        if one not in found:
            found.append(one)
    return found


def worst(order: Sequence[str]) -> Rule:
    """Return the one that comes last in `order`."""

    def rule(values: list[Any]) -> Any:
        return max(values, key=lambda one: order.index(one) if one in order else len(order))

    return rule


def at_most(rule: Rule, count: int) -> Rule:
    """Return the first so many."""
    return lambda values: rule(values)[:count]


def fields(rules: Mapping[str, Rule], *, others: Rule = first) -> Rule:
    """Of an object: each member by its rule. None where no worker has one."""

    def rule(values: list[Any]) -> Any:
        known = known_of(values)
        if not known:
            return None
        names = dict.fromkeys(name for one in known for name in one)
        return {name: rules.get(name, others)([one[name] for one in known if name in one]) for name in names}

    return rule


def each(rule: Rule) -> Rule:
    """Of an object whose members are alike: all of them by one rule."""
    return fields({}, others=rule)


def keyed(names: Sequence[str], rule: Rule, *, order: Callable[[Any], Any] | None = None) -> Rule:
    """Of lists of objects: those that agree in `names` are one, by `rule`."""

    def merged(values: list[Any]) -> list[Any]:
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for one in _flat(values):
            groups.setdefault(tuple(one.get(name) for name in names), []).append(one)
        found = [rule(group) for group in groups.values()]
        return sorted(found, key=order) if order is not None else found

    return merged


def newest(values: list[Any]) -> list[Any]:
    """Of lists of things with an age."""
    return sorted(_flat(values), key=lambda one: one["ago_s"])


def pick(key: Callable[[Any], Any]) -> Rule:
    """Return the whole of the one with the largest `key`."""
    return lambda values: max(known_of(values), key=key, default=None)


def known_of(values: Iterable[Any]) -> list[Any]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def _flat(values: Iterable[Any]) -> list[Any]:
    return [one for each in values for one in each or ()]


def merge_histories(values: list[Any]) -> dict[str, Any]:
    """Series of samples, the latest of each worker beside the latest of the others. Quantiles are weighted by
    requests: what the whole would have is not known any more."""
    length = max(len(one["ago_s"]) for one in values)

    def column(name: str) -> list[list[Any]]:
        padded = [[None] * (length - len(one[name])) + one[name] for one in values]
        return [list(row) for row in zip(*padded, strict=True)]

    requests = column("requests")
    merged = {name: [total(row) for row in column(name)] for name in values[0] if not name.startswith("ttft")}
    merged["ago_s"] = [smallest(row) for row in column("ago_s")]
    for name in ("ttft_p50_s", "ttft_p95_s"):
        merged[name] = [_weighted(*both) for both in zip(column(name), requests, strict=True)]
    return merged


def _weighted(values: list[Any], weights: list[Any]) -> float | None:
    pairs = [(value, weight or 0) for value, weight in zip(values, weights, strict=True) if value is not None]
    whole = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / whole if whole else None


#: Workers notice one event within this time of each other.
_ONE_EVENT_S = 10.0


def merge_events(values: list[Any]) -> list[Any]:
    """Return the newest first; what several workers noticed at about the same time once, when the first of them did."""
    kept: list[Any] = []
    latest: dict[str, float] = {}
    for one in sorted(_flat(values), key=lambda event: -event["ago_s"]):
        if latest.get(one["what"], math.inf) - one["ago_s"] > _ONE_EVENT_S:
            latest[one["what"]] = one["ago_s"]
            kept.append(one)
    return kept[::-1]


def merge_findings(values: list[Any]) -> list[Any]:
    """Return equal findings of several workers once, with the age of the oldest; their numbers may differ."""
    found: dict[tuple[str, ...], Any] = {}
    for one in _flat(values):
        key = (one["severity"], one["where"], re.sub(r"[\d.,]+", "#", one["what"]))
        other = found.setdefault(key, dict(one))
        other["age_s"] = max(other["age_s"], one["age_s"])
    return sorted(found.values(), key=lambda one: _SEVERITIES.index(one["severity"]))
