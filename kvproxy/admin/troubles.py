"""What an operator should know, in the order of urgency: endpoints down, sources of facts down, requests that fail,
and the rest. Each with its age."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvproxy.admin.findings import (
    DOWN,
    NAMED,
    Rank,
    Trouble,
    find_engine_findings,
    find_lost_adapters,
    find_sync_troubles,
    find_unheeded_priority,
    find_unlearned,
    find_unsteered_ranks,
    list_names,
    source_trouble,
)
from kvproxy.admin.operated import AdminTarget, OperatorFinding
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.request.exchange import FAILED
from kvproxy.request.observer import Tally

#: A share of failed requests from here on is a finding (and so many of them), and from there on a problem. The alert
#: KvproxyErrors has the first of them too.
FAILED_SHARE, FAILED_LEAST, FAILED_MOST = 0.05, 3, 0.5
_PROBE = {"unreachable": "it cannot be reached", "timeout": "no answer in time", "failed": "it answers, with an error"}
_DOCTOR = "read the engine's log, or run `kvproxy doctor`"
_SEVERITIES = ("problem", "error", "warning", "note", "ok")


class Troubles:
    """Looked at once a second, so that ages are right when a person looks. Keeps a time for each present trouble."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated
        self._since: dict[tuple[str, ...], float] = {}

    def update_findings(self, now: float, minute: Tally) -> list[tuple[Trouble, float]]:
        """All there are, each with when it was seen first, the worst first."""
        present = [*self._endpoints(now, minute), *self._sources(now), *_failing(minute), *self._rest()]
        self._since = {one.key: self._since.get(one.key, now) for one in present}
        shown = [(one, self._since[one.key]) for one in present if now - self._since[one.key] >= one.patience_s]
        return sorted(shown, key=lambda pair: (pair[0].rank, _SEVERITIES.index(pair[0].severity)))

    def _endpoints(self, now: float, minute: Tally) -> Iterator[Trouble]:
        for name, cluster in self._operated.clusters.items():
            down = [one for one in cluster.endpoints if one.condition(now) in DOWN]
            if not down:
                continue
            others = _who_took_over(name, cluster, minute, now)
            if len(down) <= NAMED:
                for one in down:
                    yield _down(("down", name, str(one.id)), f"{name}/{one.id}", f"{_why(one, now)}; {others}")
            else:
                what = f"{len(down)} of {len(cluster.endpoints)} endpoints are down ({list_names(down)}); {others}"
                yield _down(("down", name), name, what)

    def _sources(self, now: float) -> Iterator[Trouble]:
        for name, cluster in self._operated.clusters.items():
            for source, why in cluster.discovery_complaints.items():
                what = f"the {source} discovery fails, and the endpoints it named last stay: {why}"
                yield source_trouble(("discovery", name, source), name, what, "`kvproxy doctor` asks it")
        if self._operated.sync is not None:
            yield from find_sync_troubles(self._operated.sync)
        kvcache = self._operated.kvcache
        if kvcache is None:
            return
        for outage in kvcache.breakers.outages:
            what = f"{outage.operation} fails: {outage.meaning} (last error: {outage.last_error})"
            yield source_trouble(("outage", outage.operation), "kvcache", what, "is it up? `kvproxy doctor` asks it")
        for name, cluster in self._operated.clusters.items():
            yield from find_engine_findings(kvcache, name, cluster, now)

    def _rest(self) -> Iterator[Trouble]:
        kvcache = self._operated.kvcache
        alarms: Sequence[OperatorFinding] = () if kvcache is None else kvcache.state.predictions.raised_alarms()
        unknown = find_unlearned(self._operated.clusters)
        unheeded = find_unheeded_priority(self._operated.clusters)
        for kind, found in (
            ("alarm", alarms),
            ("speeds", unknown),
            ("priority", unheeded),
            ("ranks", find_unsteered_ranks(self._operated.clusters)),
            ("adapters", find_lost_adapters(self._operated.clusters)),
            ("finding", self._operated.findings),
        ):
            for one in found:
                # Alarms and speeds count in their text; findings of one place may be several.
                about = (kind, one.where, one.what) if kind == "finding" else (kind, one.where)
                yield Trouble(about, Rank.REST, str(one.severity), one.where, one.what, one.fix)


def _down(key: tuple[str, ...], where: str, what: str) -> Trouble:
    return Trouble(key, Rank.DOWN, "problem", where, what, _DOCTOR)


def _why(endpoint: Endpoint, now: float) -> str:
    condition, metrics = endpoint.condition(now), endpoint.metrics
    last = f", last error: {metrics.last_failure.replace('_', ' ')}" if metrics.last_failure else ""
    if condition is Condition.UNHEALTHY:
        probe = _PROBE.get(metrics.last_probe, "")
        return f"down: its probes fail{f' ({probe})' if probe else ''}"
    if condition is Condition.EJECTED:
        return f"down: requests failed in a row{last}; tried again in {endpoint.health.ejected_until - now:.0f} s"
    return f"down: its breaker is open{last}"


def _who_took_over(name: str, cluster: Cluster, minute: Tally, now: float) -> str:
    up = [one for one in cluster.endpoints if one.condition(now) in (Condition.UP, Condition.SATURATED)]
    if not up:
        return "no endpoint of the cluster is up, so all are tried"
    requests = count_by_endpoint(minute)
    busy = sorted((one for one in up if (name, str(one.id)) in requests), key=lambda e: -requests[name, str(e.id)])
    return f"{list_names(busy)} took over" if busy else f"{list_names(up)} would take its requests"


def _failing(minute: Tally) -> Iterator[Trouble]:
    for name, (requests, failed) in count_by_cluster(minute).items():
        if failed >= FAILED_LEAST and failed / requests >= FAILED_SHARE:
            what = f"{failed / requests:.0%} of {requests:,} requests failed in the last minute ({failed:,})"
            severity = "problem" if failed / requests >= FAILED_MOST else "warning"
            fix = "look at the failed among the last decisions, and at the log"
            yield Trouble(("failed", name), Rank.FAILED, severity, name or "no cluster", what, fix)


def count_by_cluster(tally: Tally) -> dict[str, tuple[int, int]]:
    """Requests, and the failed among them, by cluster ("": none was found)."""
    found: dict[str, tuple[int, int]] = {}
    for (cluster, _, result), count in tally.items():
        requests, failed = found.get(cluster, (0, 0))
        found[cluster] = (requests + count, failed + (count if result == FAILED else 0))
    return found


def count_by_endpoint(tally: Tally) -> Mapping[tuple[str, str], int]:
    """Requests by cluster and endpoint."""
    found: dict[tuple[str, str], int] = {}
    for (cluster, endpoint, _), count in tally.items():
        if endpoint is not None:
            found[cluster, str(endpoint)] = found.get((cluster, str(endpoint)), 0) + count
    return found
