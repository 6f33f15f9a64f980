"""Troubles for an operator, in the order of urgency: endpoints down, sources of facts down, requests that fail, and the
rest. Each with its age."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvproxy.base.background_task import in_slices
from kvproxy.base.installed import installed
from kvproxy.cluster.endpoint import DOWN, TAKING, Condition, Endpoint
from kvproxy.operate.admin.config_file import find_refused_file
from kvproxy.operate.admin.failures import count_by_endpoint, find_failing
from kvproxy.operate.admin.findings import (
    NAMED,
    Rank,
    Trouble,
    find_certificate_findings,
    find_lost_adapters,
    find_unlearned,
    find_unsteered_ranks,
    list_engine_findings,
    list_names,
    source_trouble,
)
from kvproxy.operate.feature import Feature
from kvproxy.operate.runtime.operated import AdminTarget, Conditions, OperatorFinding
from kvproxy.operate.runtime.recent import FailureTally, Tally

_PROBE = {"unreachable": "not reachable", "timeout": "no answer in time", "failed": "answers with an error"}
_DOCTOR = "read the engine's log, or run `kvproxy doctor`"
_ONE_A_PLACE = ("alarm", "speeds", "ranks", "adapters", "certificates")
_SEVERITIES = ("problem", "error", "warning", "note", "ok")


class Troubles:
    """Looked at once a second, so that ages are right when a person looks. Keeps a time for each present trouble."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated
        self._since: dict[tuple[str, ...], float] = {}

    async def update_findings(
        self, now: float, conditions: Conditions, minute: Tally, failures: FailureTally
    ) -> list[tuple[Trouble, float]]:
        """All there are, each with when it was seen first, the worst first."""
        found: dict[tuple[str, ...], Trouble] = {}  # by text: the doctor's look at the start may have found the same
        async for group in in_slices(self._list_groups(now, conditions, minute, failures)):
            for one in group:
                found.setdefault((one.where, one.what, one.fix), one)
        present = list(found.values())
        refused = dict(find_refused_file(self._operated.reloader, now))
        self._since = {one.key: self._since.get(one.key, now) for one in present} | {
            one.key: changed_at for one, changed_at in refused.items()
        }
        present += refused
        shown = [(one, self._since[one.key]) for one in present if now - self._since[one.key] >= one.patience_s]
        return sorted(shown, key=lambda pair: (pair[0].rank, _SEVERITIES.index(pair[0].severity)))

    def _list_groups(
        self, now: float, conditions: Conditions, minute: Tally, failures: FailureTally
    ) -> Iterator[Iterable[Trouble]]:
        """Yield the findings, those of each walk over the endpoints by themselves."""
        kvcache = self._operated.kvcache
        for name, found in conditions.items():
            yield _find_down(name, found, minute, now)
        yield self._sources()
        for name, found in conditions.items() if kvcache is not None else ():
            if (cluster := self._operated.clusters.get(name)) is not None and kvcache is not None:
                yield from list_engine_findings(kvcache, name, cluster, found)
        yield find_failing(self._operated.clusters, minute, failures)
        yield from self._rest()

    def _sources(self) -> Iterator[Trouble]:
        for name, cluster in self._operated.clusters.items():
            for source, why in cluster.poller.complaints.items():
                what = f"the {source} discovery fails; its last endpoints stay in use: {why}"
                yield source_trouble(("discovery", name, source), name, what, "`kvproxy doctor` checks it")
            for source, left_out in cluster.poller.left_out.items():
                what = f"the {source} discovery names {len(left_out)} that cannot be an endpoint: {left_out[0]}"
                yield source_trouble(("left out", name, source), name, what, "correct it at its source")
        kvcache = self._operated.kvcache
        if kvcache is None:
            return
        for outage in kvcache.breakers.outages:
            what = f"{outage.operation} fails: {outage.meaning} (last error: {outage.last_error})"
            yield source_trouble(("outage", outage.operation), "kvcache", what, "is it up? `kvproxy doctor` checks it")

    def _rest(self) -> Iterator[Iterable[Trouble]]:
        kvcache = self._operated.kvcache
        alarms: Sequence[OperatorFinding] = () if kvcache is None else kvcache.state.predictions.raised_alarms()
        unknown = find_unlearned(self._operated.clusters)
        for kind, found in (
            ("alarm", alarms),
            ("speeds", unknown),
            ("ranks", find_unsteered_ranks(self._operated.clusters)),
            ("adapters", find_lost_adapters(self._operated.clusters)),
            ("certificates", find_certificate_findings(self._operated.certificates)),
            *((feature.name, feature.find_troubles(self._operated)) for feature in installed(Feature)),
            ("finding", self._operated.findings),
        ):
            yield [one if isinstance(one, Trouble) else _trouble(kind, one) for one in found]


def _trouble(kind: str, one: OperatorFinding) -> Trouble:
    # Alarms and speeds count in their text; findings of one place may be several.
    about = (kind, one.where) if kind in _ONE_A_PLACE else (kind, one.where, one.what)
    return Trouble(about, Rank.REST, str(one.severity), one.where, one.what, one.fix)


def _find_down(name: str, conditions: Mapping[Endpoint, Condition], minute: Tally, now: float) -> Iterator[Trouble]:
    down = {one: condition for one, condition in conditions.items() if condition in DOWN}
    if not down:
        return
    up = [one for one, condition in conditions.items() if condition in TAKING]
    others = _who_took_over(name, up, minute)
    if len(down) > 1 and not up:
        yield _down(("outage", name), name, _outage(down, len(conditions)))
    elif len(down) <= NAMED:
        for one, condition in down.items():
            yield _down(("down", name, str(one.id)), f"{name}/{one.id}", f"{_why(one, condition, now)}; {others}")
    else:
        what = f"{len(down)} of {len(conditions)} endpoints are down ({list_names(list(down))}); {others}"
        yield _down(("down", name), name, what)


def _down(key: tuple[str, ...], where: str, what: str) -> Trouble:
    return Trouble(key, Rank.DOWN, "problem", where, what, _DOCTOR)


def _why(endpoint: Endpoint, condition: Condition, now: float) -> str:
    metrics = endpoint.metrics
    last = f", last error: {metrics.last_failure.replace('_', ' ')}" if metrics.last_failure else ""
    if condition is Condition.UNHEALTHY:
        probe = _PROBE.get(metrics.last_probe, "")
        return f"down: its probes fail{f' ({probe})' if probe else ''}"
    if condition is Condition.EJECTED:
        return f"down: requests failed in a row{last}; tried again in {endpoint.health.ejected_until - now:.0f} s"
    return f"down: its breaker is open{last}"


def _outage(down: Mapping[Endpoint, Condition], all_of_them: int) -> str:
    """All engines of a cluster at once: those that are down for the same reason together."""
    alike: dict[str, list[Endpoint]] = {}
    for one, condition in down.items():
        alike.setdefault(_cause(one, condition), []).append(one)
    causes = "; ".join(f"{list_names(some)}: {why}" for why, some in alike.items())
    how_many = f"all {all_of_them}" if len(down) == all_of_them else f"{len(down)} of {all_of_them}"
    rest = "" if len(down) == all_of_them else ", and no other takes requests"
    return f"{how_many} engines are down{rest} ({causes}); requests go to all of them"


def _cause(endpoint: Endpoint, condition: Condition) -> str:
    metrics = endpoint.metrics
    if condition is Condition.UNHEALTHY:
        return _PROBE.get(metrics.last_probe, "its probes fail")
    return metrics.last_failure.replace("_", " ") or "requests failed in a row"


def _who_took_over(name: str, up: Sequence[Endpoint], minute: Tally) -> str:
    if not up:
        return "no endpoint of the cluster is up, so all are tried"
    requests = count_by_endpoint(minute)
    busy = sorted((one for one in up if (name, str(one.id)) in requests), key=lambda e: -requests[name, str(e.id)])
    return f"{list_names(busy)} took over" if busy else f"{list_names(up)} would take its requests"
