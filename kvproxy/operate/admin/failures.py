"""Requests of the last minute that were not served, by cause, with what helps against each cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvproxy.cluster.cluster import Cluster
from kvproxy.operate.admin.findings import Rank, Trouble
from kvproxy.proxy.request.exchange import BROKEN_OFF, ENGINE_5XX, FAILED, QUEUE_FULL
from kvproxy.proxy.request.observer import FailureTally, Tally

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
        what = f"{unserved / requests:.0%} of {requests:,} requests failed in the last minute"
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
