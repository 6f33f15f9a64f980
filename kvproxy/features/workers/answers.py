"""Rules that merge the workers' answers of the admin listener: a table for each path. Values without a rule are the
first worker's: they are the same in all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from kvproxy.base.installed import installed
from kvproxy.base.metrics.across_workers import Across, rule_of
from kvproxy.operate.feature import Feature
from kvproxy.operate.merge import (
    Rule,
    at_most,
    each,
    fields,
    first,
    joined,
    keyed,
    known_of,
    largest,
    mean,
    merge_events,
    merge_findings,
    merge_histories,
    newest,
    pick,
    smallest,
    total,
    worst,
)

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


#: From the best to the worst.
_CONDITIONS = ("up", "saturated", "draining", "asleep", "ejected", "breaker_open", "unhealthy")
_STATES = ("good", "warn", "down")
_LOADS = ("in_flight", "pending_tokens", "resident_tokens")  # each worker knows all of it
_BREAKERS = ("closed", "half-open", "open")


def merge_caches(values: list[Any]) -> Any:
    """Merge the accounts of an endpoint's cache: that of the worker with most data on it. Others' requests are those
    that no worker sent."""
    found = known_of(values)
    if not found:
        return None
    fullest = max(found, key=lambda one: one["approximate_blocks"] + one["precise_blocks"])
    foreign = known_of(one["hit_ratio"]["foreign"] for one in found)
    rest = combine_values(Across.REST, foreign) if foreign else None
    return {**fullest, "hit_ratio": {**fullest["hit_ratio"], "foreign": rest}}


_ENDPOINT = fields(
    {
        "condition": worst(_CONDITIONS),
        **dict.fromkeys(("requests_last_minute", "errors_last_minute"), total),
        "ttft_p95_s": largest,
        **dict.fromkeys(_LOADS, largest),
        **dict.fromkeys(("failures_in_a_row", "probes_in_doubt", "ejected_for_s"), largest),
        "breaker": worst(_BREAKERS),
        "engine": pick(lambda one: -one["age_s"]),
        "cache": merge_caches,
    }
)
_QUEUE = fields(
    {
        **dict.fromkeys(("depth", "limit", "waiting_for_room", "without_endpoint", "refused"), total),
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
_PROMISES = fields(
    {
        "held": keyed(("cluster", "endpoint", "prefix", "tenant"), first),
        "waiting": largest,
        "kept_ratio": mean,
        "results": each(total),
        "tenants": keyed(("tenant",), fields({"tokens": largest})),
    }
)
_BREAKS = fields({"returned": total, "sessions": largest, "causes": _CAUSES, "latest": at_most(newest, 100)})

#: Of `/live`, and of other paths.
_LIVE: Mapping[str, Rule] = {
    "uptime_s": largest,
    "ready": any,
    "state": pick(lambda one: _STATES.index(one["kind"])),
    "endpoints": keyed(("cluster", "id"), _ENDPOINT),
    "last_minute": _COUNTS,
    "ttft": each(mean),
    "events": at_most(merge_events, 20),
    "clusters": each(_COUNTS),
    "history": merge_histories,
    "routing": _ROUTING,
    "cache": fields(
        {
            "running": joined,
            "waiting": total,
            "leases": largest,
            "promises": fields({"prompts": largest, "tokens": largest, "kept": total, "broken": total}),
            "breakers": each(worst(_BREAKERS)),
            "hot": at_most(_HOT, 8),
            "breaks": _BREAKS,
        }
    ),
    "decisions": at_most(newest, 15),
    "failed_decisions": at_most(newest, 15),
    "findings": merge_findings,
}

_STATUS: Mapping[str, Rule] = {
    "indexes": each(fields({"endpoints": each(first)}, others=each(largest))),
    "token_memory": fields({"recalls": each(total)}, others=total),
    "background": fields({"running": joined}, others=total),
    "breakers": each(worst(_BREAKERS)),
    "troubles": keyed(("kind", "cluster", "endpoint", "what"), fields({"for_s": largest})),
    "switched_off": joined,
    "bytes_per_token": mean,
    "predictions": fields({"alarms": joined}, others=each(total)),
    **dict.fromkeys(("lookups", "tokenizes", "actions"), each(total)),
}

_PATHS: Mapping[str, Rule] = {
    "/endpoints": fields({"clusters": each(keyed(("id", "leaving"), _ENDPOINT))}),
    "/routing": fields({"clusters": _ROUTING}),
    "/decisions": fields({"decisions": newest}),
    "/cache/hot": fields({"prefixes": _HOT}),
    "/cache/leases": fields({"leases": _LEASES, "promises": _PROMISES}),
    "/cache/breaks": _BREAKS,
}


@cache
def list_rules() -> Mapping[str, Rule]:
    """Return the rule of each path; others have one answer for all: the first worker's."""
    members: dict[str, Mapping[str, Rule]] = {"/live": _LIVE, "/cache/status": _STATUS}
    for feature in installed(Feature):
        for path, added in feature.merge_rules().items():
            members[path] = {**members.get(path, {}), **added}
    return {**_PATHS, **{path: fields(rules) for path, rules in members.items()}}


def find_rule(path: str) -> Rule | None:
    """Return the rule of a path, whose name may be a pattern; None: its answer is the same in all."""
    rules = list_rules()
    return rules.get(path) or next((rule for name, rule in rules.items() if fnmatchcase(path, name)), None)


def merge_answers(path: str, answers: list[Any], *, limit: int | None = None) -> Any:
    """Return the one answer for `path`; of the lists in it at most `limit`."""
    merged = (find_rule(path) or first)(answers)
    if limit is None or not isinstance(merged, dict):
        return merged
    return {name: value[:limit] if isinstance(value, list) else value for name, value in merged.items()}
