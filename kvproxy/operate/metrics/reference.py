"""Generates docs/metrics.md from the catalogue: every metric with its type, labels and meaning.

`python -m kvproxy.operate.metrics.reference > docs/metrics.md`
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvproxy.base.metrics.across_workers import rule_of
from kvproxy.base.metrics.groups import Metrics
from kvproxy.operate.metrics.catalog import list_groups, merge_rules

_HEAD = """# Metrics

Generated from the catalogue by `python -m kvproxy.operate.metrics.reference`; do not edit by hand.

The admin listener serves them under `/metrics` in the Prometheus text format. A dashboard is in
`deploy/grafana/kvproxy.json`, alert rules are in `deploy/prometheus/alerts.yaml`; [deployment](deployment.md)
has their setup and the response to each alert.

The page is written in slices of half a millisecond, so that a scrape delays no request, however many endpoints there
are; [what it costs](../benchmarks/reports/scrape.md).

`kvproxy serve` adds the usual figures of the process (`process_resident_memory_bytes`, `process_cpu_seconds_total`,
`process_open_fds` and so on).

With several [workers](../kvproxy/features/workers/README.md) there is one page for all, without a label for the worker.
Counters and histograms are summed, and never fall when a worker ends. The type of a gauge names its rule: `sum`,
if each worker has its own part; `max` or `min`, if all measure the same and the worse counts; `mean` of shares and of
learned values; `rest`, the share that is no worker's own.

Labels come from closed sets or from the configuration, never from a client, so the number of series is bounded:
endpoints times a small constant. An endpoint that leaves takes its series along.
"""

#: Contents of each label that several groups have; the others are listed with their group.
LABELS: Mapping[str, str] = {
    "action": "`pin`, `compress` or `evict`",
    "breaker": "what the breaker guards",
    "by": "what is counted (`tokens` or `requests`), or by whose word (`engine`, `responses`, `prediction`)",
    "client": "which of the known kinds of client sent it ([sessions](sessions.md)), empty: another",
    "cluster": "name of the cluster in the configuration",
    "direction": "`in` or `out`",
    "end": "`completed`, `engine_error`, `upstream_died`, `client_disconnected` or `local_reply`",
    "endpoint": "id of the endpoint",
    "index": "`approximate`, `in_flight`, `precise`, `hot`, `sessions` (hashes of chats, at most 64 MiB a cluster), "
    "`session_parts` (digests of sessions' last prompts, at most 17 MiB) or `prefixes` (tokens of prefixes that may be "
    "pinned or evicted, at most 64 MiB)",
    "kind": "one of a few kinds, which the meaning of the metric names",
    "model": "a model that an endpoint declares, a route names or an engine lists (50 of these at most); else `other`, "
    "as the first requests for a listed one are, until the engines were asked",
    "outcome": "how it ended",
    "policy": "name of the balancing policy",
    "queue": "which bounded place: `upstream` connections, `rate_limit` buckets, `kvcache_...` jobs, `receipts`, "
    "`ledger`, reservations (`picks`), requests in a "
    "`router/CLUSTER` queue, client `connections`",
    "rank": "data-parallel rank of the engine",
    "reason": "the reason; a closed set for each metric",
    "result": "the outcome",
    "session": "`named`, `child` (of a sub-agent or a fork) or `none`",
    "source": "`approximate`, `precise`, or `session`: where its session was served last",
    "state": "`1` on the series of the current state, `0` on the others; for connections `open` or `idle`, for "
    "processes `alive` or `silent`",
    "stream": "`true` for streamed answers, whose first byte comes before the rest; `false` for others",
    "tenant": "name of the API key, empty without `auth`; `other` beyond 200 pairs of model and tenant",
    "tier": "`device` (engine memory), `pinned`, `host`, `disk` or `shared` (a store that several engines read)",
    "status": "HTTP status",
    "version": "of kvproxy",
    "what": "one of a few things, which the meaning of the metric names",
}


@dataclass(frozen=True, slots=True)
class Described:
    """One metric as a scrape shows it; `name` has the suffix of a counter."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def series(self) -> Mapping[str, frozenset[str]]:
        """Names that queries may use, with the labels each has."""
        labels = frozenset(self.labels)
        if self.kind == "histogram":
            return {
                f"{self.name}_bucket": labels | {"le"},
                f"{self.name}_sum": labels,
                f"{self.name}_count": labels,
            }
        return {self.name: labels}


def describe_metrics() -> dict[str, list[Described]]:
    """Every metric of the catalogue by section (the docstring of its group), in its order."""
    metrics = Metrics()
    groups = [metrics.group(kind) for kind in list_groups()]
    return {
        (inspect.getdoc(group) or "").rstrip("."): [
            _describe(metric) for metric in vars(group).values() if hasattr(metric, "describe")
        ]
        for group in groups
    }


def render_reference() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *_tables(), *_labels()]) + "\n"


def _describe(metric: Any) -> Described:
    (family,) = metric.describe()
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Described(name, family.type, tuple(metric._labelnames), family.documentation)


def label_texts() -> Mapping[str, str]:
    """Contents of every label in the catalogue."""
    texts = dict(LABELS)
    for label, text in chain.from_iterable(group.labels.items() for group in list_groups()):
        texts[label] = f"{texts[label]}; {text}" if label in texts else text
    return texts


def _tables() -> Iterator[str]:
    rules = merge_rules()
    for title, metrics in describe_metrics().items():
        yield f"\n## {title}\n\n| Metric | Type | Labels | Meaning |\n|---|---|---|---|"
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            rule = f", {rule_of(metric.name, metric.kind, rules)}" if metric.kind == "gauge" else ""
            yield f"| `{metric.name}` | {metric.kind}{rule} | {labels} | {metric.meaning} |"


def _labels() -> Iterator[str]:
    used = {label for metrics in describe_metrics().values() for metric in metrics for label in metric.labels}
    texts = label_texts()
    yield "\n## Labels\n\n| Label | Holds |\n|---|---|"
    for label in sorted(used):
        yield f"| `{label}` | {texts[label]} |"


if __name__ == "__main__":
    sys.stdout.write(render_reference())
