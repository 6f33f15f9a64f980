"""The state of the whole proxy in one sentence, for the page, its title and the first line of `kvproxy status`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import DOWN, TAKING, Condition
from kvproxy.cluster.routes import clusters_without_endpoint
from kvproxy.operate.admin.failures import FAILED_LEAST, FAILED_MOST, FAILED_SHARE
from kvproxy.operate.admin.operated import AdminTarget


@dataclass(frozen=True, slots=True)
class State:
    """`kind` is good, warn or down; `text` is short enough for a pill. `since_s`: for how long engines have been down,
    if the sentence is about these."""

    kind: str
    text: str
    sentence: str
    since_s: float | None = None


def describe_state(operated: AdminTarget, now: float, *, requests: int, failed: int, down_since: float | None) -> State:
    """Return the state to show an operator first; `requests` and `failed` are those of the last minute."""
    if operated.draining:
        return State("warn", "draining", "Draining: no new connections are taken")
    since_s = None if down_since is None else now - down_since
    if without := clusters_without_endpoint(operated.clusters, now):
        return _outage([operated.clusters[name] for name in without], now, operated, since_s)
    conditions = _conditions(operated.clusters.values(), now)
    down = sum(one in DOWN for one in conditions)
    engines = _of_engines(conditions, down)
    if failed >= FAILED_LEAST and failed / requests >= FAILED_SHARE:
        share = f"{failed / requests:.0%} of requests fail"
        sentence = f"{share}, {engines[0].lower()}{engines[1:]}" if down else share
        kind, text = ("down", share) if failed / requests >= FAILED_MOST else ("warn", f"degraded: {share}")
        return State(kind, text, sentence)
    if down:
        up = sum(one in TAKING for one in conditions)
        return State("warn", f"degraded: {up} of {len(conditions)} up", engines, since_s)
    return State("good", "ready", engines)


def _outage(clusters: list[Cluster], now: float, operated: AdminTarget, since_s: float | None) -> State:
    conditions = _conditions(clusters, now)
    names = ", ".join(one.name for one in clusters)
    of = f" of {names}" if len(operated.clusters) > 1 else ""
    if not conditions:
        return State("down", f"down: no engine in {names}", f"No engine{of} is configured or found")
    if not any(one in DOWN for one in conditions):
        return State("down", f"down: 0 of {len(conditions)} engines{of} take requests", f"No engine{of} takes requests")
    return State("down", f"down: 0 of {len(conditions)} engines{of} up", f"No engine{of} up", since_s)


def _conditions(clusters: Iterable[Cluster], now: float) -> list[Condition]:
    """One for each engine: its ranks are well or not well together."""
    return list({one.engine: one.condition(now) for each in clusters for one in each.endpoints}.values())


def _of_engines(conditions: list[Condition], down: int) -> str:
    if down:
        return f"{down} of {len(conditions)} engines down"
    up = sum(one in TAKING for one in conditions)
    if up < len(conditions):
        return f"{up} of {len(conditions)} engines take requests"
    return "All engines up" if up != 1 else "The engine is up"
