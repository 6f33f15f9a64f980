"""One page of metrics out of those of several processes: no label says which process a figure comes from.

Counters and histograms are summed, and never fall: what a process counted that is gone still counts. Gauges have a rule
each, by what they are a figure of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum


class Across(StrEnum):
    """What several processes' values of one gauge are together."""

    SUM = "sum"  # each has its own part
    MAX = "max"  # each looks at the same thing; the worst or the fullest counts
    MIN = "min"  # likewise, where less is worse
    MEAN = "mean"  # shares, and what each learned for itself
    REST = "rest"  # shares that are not a process's own: what is no process's own


_COMBINE: Mapping[Across, Callable[[Sequence[float]], float]] = {
    Across.SUM: sum,
    Across.MAX: max,
    Across.MIN: min,
    Across.MEAN: lambda values: sum(values) / len(values),
    Across.REST: lambda values: max(0.0, sum(values) - len(values) + 1),
}

#: Gauges that are not summed.
RULES: Mapping[str, Across] = {
    **dict.fromkeys(
        (
            "kvproxy_build_info",
            "kvproxy_router_queue_oldest_wait_seconds",
            "kvproxy_endpoint_adapters",
            "kvproxy_discovery_failing",
            "kvproxy_engine_priority_state",
            "kvproxy_kv_event_lag_seconds",
            "kvproxy_kv_event_stream_state",
            "kvproxy_kvcache_prediction_alarm",
            "kvproxy_kvcache_index_blocks",
            "kvproxy_kvcache_last_served",
            "kvproxy_kvcache_index_utilisation_ratio",
            "kvproxy_kvcache_index_capacity_blocks",
            "kvproxy_endpoint_reuse_step_tokens",
            "kvproxy_engine_kv_usage_ratio",
            "kvproxy_tier_blocks",
            "kvproxy_tier_tokens",
            "kvproxy_tier_bytes",
            "kvproxy_engine_cached_tokens",
            "kvproxy_engine_requests",
            "kvproxy_kvcache_snapshot_bytes",
            "kvproxy_normalize_state",
            "kvproxy_breaker_open",
            "kvproxy_sync_status",
            "kvproxy_sync_peers",
            "kvproxy_sync_peer_lag_seconds",
            "kvproxy_sync_index_blocks",
            "kvproxy_lease_entries",
            "kvproxy_lease_held_tokens",
            "process_max_fds",
        ),
        Across.MAX,
    ),
    **dict.fromkeys(
        (
            "kvproxy_endpoint_up",
            "kvproxy_sync_consistency_ratio",
            "kvproxy_sync_store_up",
            "kvproxy_kvcache_snapshot_age_seconds",
            "process_start_time_seconds",
        ),
        Across.MIN,
    ),
    **dict.fromkeys(
        (
            "kvproxy_cache_hit_ratio",
            "kvproxy_cache_miss_ratio",
            "kvproxy_learned_prefill_tokens_per_second",
            "kvproxy_learned_slowness",
            "kvproxy_learned_onboarding_seconds_per_token",
            "kvproxy_kvcache_trust_ratio",
            "kvproxy_endpoint_cache_hit_ratio",
            "kvproxy_lease_kept_ratio",
        ),
        Across.MEAN,
    ),
    "kvproxy_engine_foreign_tokens_ratio": Across.REST,
}


def combine_values(rule: Across, values: Sequence[float]) -> float:
    """One value of several."""
    return _COMBINE[rule](values)


def rule_of(name: str, kind: str) -> Across:
    """How the series of a metric become one; `name` and `kind` as in the exposition."""
    return RULES.get(name, Across.SUM) if kind == "gauge" else Across.SUM


class Family:
    """One metric of a page: its values by series, in the order they were written."""

    __slots__ = ("documentation", "kind", "name", "series")

    def __init__(self, name: str, kind: str = "untyped", documentation: str = "") -> None:
        self.name, self.kind, self.documentation = name, kind, documentation
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


def add_pages(pages: Iterable[Page]) -> Page:
    """One page of all."""
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
        rule = rule_of(name, head.kind)
        family = merged[name] = Family(name, head.kind, head.documentation)
        family.series = {series: combine_values(rule, several) for series, several in values[name].items()}
    return merged


def keep_counts(page: Page) -> Page:
    """What still counts of a process that is gone: its counters and histograms."""
    return {name: family for name, family in page.items() if family.kind != "gauge"}


def write_page(page: Page) -> bytes:
    """The text of it."""
    parts: list[str] = []
    for family in page.values():
        parts.append(f"# HELP {family.name} {family.documentation}\n# TYPE {family.name} {family.kind}\n")
        parts += [f"{series} {_number(value)}\n" for series, value in family.series.items()]
    return "".join(parts).encode()


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
