"""One answer of the admin listener out of those of all workers: pure, a table of rules for each path.

A rule takes the values that workers have for one thing, in the order of the workers and never none of them. What a
table does not name is the first one's: it is the same in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvproxy.metrics.across_workers import Across, combine_values

Rule = Callable[[list[Any]], Any]

#: The most of these counts for people; what they show is cut where a page shows no more.
_CONDITIONS = ("up", "saturated", "draining", "asleep", "ejected", "breaker_open", "unhealthy")
_STATES = ("good", "warn", "down")
_SYNC_STATES = ("synced", "alone", "joining", "degraded")
_LOADS = ("in_flight", "pending_tokens", "resident_tokens", "held_s")  # each worker knows all of it
_BREAKERS = ("closed", "half-open", "open")
_SEVERITIES = ("problem", "error", "warning", "note", "ok")


def first(values: list[Any]) -> Any:
    """The first that says anything."""
    return next((value for value in values if value is not None), None)


def total(values: list[Any]) -> Any:
    """The sum of what is known."""
    known = _known(values)
    return sum(known) if known else None


def largest(values: list[Any]) -> Any:
    """The largest of what is known."""
    return max(_known(values), default=None)


def smallest(values: list[Any]) -> Any:
    """The smallest of what is known."""
    return min(_known(values), default=None)


def mean(values: list[Any]) -> Any:
    """The mean of what is known."""
    known = _known(values)
    return sum(known) / len(known) if known else None


def joined(values: list[Any]) -> list[Any]:
    """All of them, each once."""
    found: list[Any] = []
    for one in _flat(values):
        if one not in found:
            found.append(one)
    return found


def worst(order: Sequence[str]) -> Rule:
    """The one that comes last in `order`."""

    def rule(values: list[Any]) -> Any:
        return max(values, key=lambda one: order.index(one) if one in order else len(order))

    return rule


def at_most(rule: Rule, count: int) -> Rule:
    """The first so many."""
    return lambda values: rule(values)[:count]


def fields(rules: Mapping[str, Rule], *, others: Rule = first) -> Rule:
    """Of an object: each member by its rule. None where no worker has one."""

    def rule(values: list[Any]) -> Any:
        known = _known(values)
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
    """The whole of the one with the largest `key`."""
    return lambda values: max(_known(values), key=key, default=None)


def _known(values: Iterable[Any]) -> list[Any]:
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


def merge_findings(values: list[Any]) -> list[Any]:
    """What several workers say alike is said once, with the age of the oldest; numbers in it may differ."""
    found: dict[tuple[str, ...], Any] = {}
    for one in _flat(values):
        key = (one["severity"], one["where"], re.sub(r"[\d.,]+", "#", one["what"]))
        other = found.setdefault(key, dict(one))
        other["age_s"] = max(other["age_s"], one["age_s"])
    return sorted(found.values(), key=lambda one: _SEVERITIES.index(one["severity"]))


def merge_caches(values: list[Any]) -> Any:
    """Of an endpoint's cache the account of the worker that knows most of it. What others send is what no worker
    sends."""
    found = _known(values)
    if not found:
        return None
    fullest = max(found, key=lambda one: one["approximate_blocks"] + one["precise_blocks"])
    foreign = _known(one["hit_ratio"]["foreign"] for one in found)
    rest = combine_values(Across.REST, foreign) if foreign else None
    return {**fullest, "hit_ratio": {**fullest["hit_ratio"], "foreign": rest}}


_ENDPOINT = fields(
    {
        "condition": worst(_CONDITIONS),
        "requests_last_minute": total,
        **dict.fromkeys(_LOADS, largest),
        **dict.fromkeys(("failures_in_a_row", "probes_in_doubt", "ejected_for_s"), largest),
        "breaker": worst(_BREAKERS),
        "engine": pick(lambda one: -one["age_s"]),
        "cache": merge_caches,
    }
)
_QUEUE = fields(
    {
        **dict.fromkeys(("depth", "limit", "refused"), total),
        "oldest_wait_s": largest,
        "released": each(total),
    }
)
_ROUTING = each(fields({"learned": pick(lambda one: one.get("samples", 0)), "queue": _QUEUE, "adapters": first}))
_COUNTS = fields({"requests": total, "failed": total, "saved_prefill_s": total})
_CAUSES = keyed(
    ("cause", "client", "tenant"),
    fields({"breaks": total, "tokens": total, "seconds": total, "ago_s": smallest}),
    order=lambda one: -one["tokens"],
)
_HOT = keyed(
    ("cluster", "prefix"), fields({"touches": largest, "replicas": each(largest)}), order=lambda one: -one["touches"]
)
_LEASES = keyed(("instance", "prefix"), first)
_BREAKS = fields({"returned": total, "sessions": largest, "causes": _CAUSES, "latest": at_most(newest, 100)})

_SYNC = fields(
    {
        "status": worst(_SYNC_STATES),
        "consistency_ratio": smallest,
        **dict.fromkeys(("waiting", "dropped"), total),
        "index_blocks": largest,
        "peers": keyed(
            ("origin",),
            fields(
                {
                    **dict.fromkeys(("gaps", "lost", "told_last_minute", "lost_last_minute", "waiting"), total),
                    **dict.fromkeys(("heard_s_ago", "lag_p50_s", "lag_p99_s", "round_trip_s"), largest),
                    "alive": all,
                }
            ),
        ),
    }
)

_LIVE = fields(
    {
        "uptime_s": largest,
        "ready": any,
        "state": pick(lambda one: _STATES.index(one["kind"])),
        "endpoints": keyed(("cluster", "id"), _ENDPOINT),
        "last_minute": _COUNTS,
        "clusters": each(_COUNTS),
        "history": merge_histories,
        "routing": _ROUTING,
        "cache": fields(
            {
                "running": joined,
                "waiting": total,
                "leases": largest,
                "breakers": each(worst(_BREAKERS)),
                "hot": at_most(_HOT, 8),
                "breaks": _BREAKS,
            }
        ),
        "sync": _SYNC,
        "decisions": at_most(newest, 15),
        "failed_decisions": at_most(newest, 15),
        "findings": merge_findings,
    }
)

#: What is asked for, and the rule of its answer. Other paths have one answer for all: the first worker's.
RULES: Mapping[str, Rule] = {
    "/live": _LIVE,
    "/endpoints": fields({"clusters": each(keyed(("id", "leaving"), _ENDPOINT))}),
    "/sync": _SYNC,
    "/routing": fields({"clusters": _ROUTING}),
    "/decisions": fields({"decisions": newest}),
    "/cache/hot": fields({"prefixes": _HOT}),
    "/cache/leases": fields({"leases": _LEASES}),
    "/cache/breaks": _BREAKS,
    "/cache/status": fields(
        {
            "indexes": each(fields({"endpoints": each(first)}, others=each(largest))),
            "token_memory": fields({"recalls": each(total)}, others=total),
            "snapshot": pick(lambda one: one["age_s"] is not None),
            "background": fields({"running": joined}, others=total),
            "breakers": each(worst(_BREAKERS)),
            "troubles": keyed(("kind", "cluster", "endpoint", "what"), fields({"for_s": largest})),
            "switched_off": joined,
            "bytes_per_token": mean,
            "predictions": fields({"alarms": joined}, others=each(total)),
            **dict.fromkeys(("lookups", "tokenizes", "actions"), each(total)),
        }
    ),
}


def merge_answers(path: str, answers: list[Any], *, limit: int | None = None) -> Any:
    """The one answer for `path`; of the lists in it at most `limit`."""
    merged = RULES.get(path, first)(answers)
    if limit is None or not isinstance(merged, dict):
        return merged
    return {name: value[:limit] if isinstance(value, list) else value for name, value in merged.items()}
