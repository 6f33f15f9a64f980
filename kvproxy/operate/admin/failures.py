"""Requests of the last minute that were not served, by cause, with a fix for each, and the state of the whole proxy in
one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import DOWN, TAKING, Condition, Endpoint
from kvproxy.cluster.routes import clusters_without_endpoint
from kvproxy.operate.admin.findings import Rank, Trouble
from kvproxy.operate.runtime.operated import AdminTarget, Conditions
from kvproxy.operate.runtime.recent import FailureTally, Tally
from kvproxy.proxy.request.exchange import BROKEN_OFF, ENGINE_5XX, FAILED, QUEUE_FULL

#: Share of failed requests (and their number) from which a finding appears, and from which it is a problem. The alert
#: KvproxyErrors uses the first share too.
FAILED_SHARE = 0.05
FAILED_LEAST = 3
FAILED_MOST = 0.5
#: Causes, and engines of a cause, named by one finding.
_NAMED = 3
_LOG = "look at the failed among the last decisions, and at the log"


@dataclass(frozen=True, slots=True)
class _Cause:
    what: str
    fix: str


_NO_ENDPOINT = _Cause("found no endpoint", "are the engines up, and not all of them drained?")
_SATURATED = _Cause("found every endpoint at its limit", "raise `max_in_flight`, or add engines")
_UNREACHABLE = _Cause("got no connection", "are these engines up, and their ports open?")
_SLOW = _Cause("got no answer in time", "raise `timeouts.first_byte`, or find out what these engines wait for")
_BROKEN = _Cause("broke off", "read the log of these engines: they may have been killed or restarted")
_CAUSES: Mapping[str, _Cause] = {
    "no_endpoints": _NO_ENDPOINT,
    "draining": _NO_ENDPOINT,
    "all_tried": _Cause("found no endpoint that had not failed already", "read the log of the engines"),
    "saturated": _SATURATED,
    "pool_full": _Cause("found every connection busy", "raise `pool.max_connections`"),
    "connect_error": _UNREACHABLE,
    "connect_timeout": _UNREACHABLE,
    "first_byte_timeout": _SLOW,
    "unhealthy": _SLOW,
    "idle_timeout": _SLOW,
    "upstream_disconnected": _BROKEN,
    "bodies_full": _Cause("were refused: too many bodies are held at once", "raise `limits.bodies`"),
    ENGINE_5XX: _Cause("were answered with 5xx", "read the log of these engines"),
    BROKEN_OFF: _BROKEN,
}


def find_failing(clusters: Mapping[str, Cluster], minute: Tally, failures: FailureTally) -> Iterator[Trouble]:
    """Yield a finding for every cluster of which a notable share of the last minute's requests was not served."""
    for name, (requests, failed) in count_by_cluster(minute).items():
        causes = _by_cause(failures, name)
        refused = sum(causes.get(QUEUE_FULL, {}).values())
        unserved = failed + refused
        if unserved < FAILED_LEAST or unserved / requests < FAILED_SHARE:
            continue
        severity = "problem" if unserved / requests >= FAILED_MOST else "warning"
        worst = sorted(causes.items(), key=lambda one: -sum(one[1].values()))[:_NAMED]
        limit = _queue_limit(clusters.get(name))
        why = ", ".join(_describe_cause(cause, engines, limit) for cause, engines in worst)
        fixes = dict.fromkeys(_fix_of(cause) for cause, _ in worst)
        verb = "were not served" if refused else "failed"
        what = f"{unserved / requests:.0%} of {requests:,} requests {verb} in the last minute"
        yield Trouble(
            ("failed", name),
            Rank.FAILED,
            severity,
            name or "no cluster",
            f"{what}: {why}" if why else what,
            "; ".join(fixes) or _LOG,
        )


def _by_cause(failures: FailureTally, cluster: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (name, endpoint, cause), count in failures.items():
        if name == cluster:
            engines = found.setdefault(cause, {})
            engines[str(endpoint or "")] = engines.get(str(endpoint or ""), 0) + count
    return found


def _describe_cause(cause: str, engines: Mapping[str, int], queue_limit: int) -> str:
    count = sum(engines.values())
    if cause == QUEUE_FULL:
        limit = f" (limit {queue_limit:,})" if queue_limit else ""
        return f"{count:,} refused, as the router queue is full{limit}"
    what = _CAUSES[cause].what if cause in _CAUSES else f"ended with {cause.replace('_', ' ')}"
    named = sorted(((name, number) for name, number in engines.items() if name), key=lambda one: -one[1])
    if not named:
        return f"{count:,} {what}"
    each = ", ".join(f"{name} {number:,}" if len(named) > 1 else name for name, number in named[:_NAMED])
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{count:,} {what} ({each}{more})"


def _fix_of(cause: str) -> str:
    if cause == QUEUE_FULL:
        return "add engines, or raise `queue.limit`"
    return _CAUSES[cause].fix if cause in _CAUSES else _LOG


def _queue_limit(cluster: Cluster | None) -> int:
    return cluster.settings.queue.limit if cluster is not None and cluster.queue is not None else 0


def count_by_cluster(tally: Tally) -> dict[str, tuple[int, int]]:
    """Count requests, and the failed among them, by cluster ("": none was found)."""
    found: dict[str, tuple[int, int]] = {}
    for (cluster, _, result), count in tally.items():
        requests, failed = found.get(cluster, (0, 0))
        found[cluster] = (requests + count, failed + (count if result == FAILED else 0))
    return found


def count_by_endpoint(tally: Tally) -> Mapping[tuple[str, str], int]:
    """Return requests by cluster and endpoint."""
    found: dict[tuple[str, str], int] = {}
    for (cluster, endpoint, _), count in tally.items():
        if endpoint is not None:
            found[cluster, str(endpoint)] = found.get((cluster, str(endpoint)), 0) + count
    return found


@dataclass(frozen=True, slots=True)
class State:
    """`kind` is good, warn or down; `text` is short enough for a pill. `since_s`: for how long engines have been down,
    if the sentence is about these."""

    kind: str
    text: str
    sentence: str
    since_s: float | None = None


def describe_state(
    operated: AdminTarget,
    now: float,
    found: Conditions,
    *,
    requests: int,
    failed: int,
    down_since: float | None,
) -> State:
    """Return the state to show an operator first; `requests` and `failed` are those of the last minute."""
    if operated.draining:
        return State("warn", "draining", "Draining: no new connections are taken")
    since_s = None if down_since is None else now - down_since
    if without := clusters_without_endpoint(operated.clusters, now):
        return _outage(without, found, operated, since_s)
    conditions = _conditions(found.values())
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


def _outage(without: list[str], found: Conditions, operated: AdminTarget, since_s: float | None) -> State:
    conditions = _conditions(found.get(name, {}) for name in without)
    names = ", ".join(without)
    of = f" of {names}" if len(operated.clusters) > 1 else ""
    if not conditions:
        return State("down", f"down: no engine in {names}", f"No engine{of} is configured or found")
    if not any(one in DOWN for one in conditions):
        return State("down", f"down: 0 of {len(conditions)} engines{of} take requests", f"No engine{of} takes requests")
    return State("down", f"down: 0 of {len(conditions)} engines{of} up", f"No engine{of} up", since_s)


def _conditions(found: Iterable[Mapping[Endpoint, Condition]]) -> list[Condition]:
    """One for each engine: its ranks are well or not well together."""
    return list({one.engine: condition for each in found for one, condition in each.items()}.values())


def _of_engines(conditions: list[Condition], down: int) -> str:
    if down:
        return f"{down} of {len(conditions)} engines down"
    up = sum(one in TAKING for one in conditions)
    if up < len(conditions):
        return f"{up} of {len(conditions)} engines take requests"
    return "All engines up" if up != 1 else "The engine is up"
