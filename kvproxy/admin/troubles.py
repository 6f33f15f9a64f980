"""What an operator should know, in the order of urgency: endpoints down, sources of facts down, requests that fail,
and the rest. Each with its age."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvproxy.admin.operated import AdminTarget, ConfigFinding, OperatorFinding
from kvproxy.clients.kv_events.status import StreamState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.engine_priority import PriorityState
from kvproxy.config.priority_schema import EnginePriorityMode
from kvproxy.kvcache.feedback.cache_losses import LossReason
from kvproxy.kvcache.feedback.missed_reuse import WINDOW, MissedReuse
from kvproxy.kvcache.overlap.kv_event_streams import EventStreams
from kvproxy.request.exchange import FAILED
from kvproxy.request.recent import Tally

#: So many placements without one sample are no accident.
NOTABLE_REQUESTS = 500
_FIX = (
    "stream answers, or let the kvcache filter read the engines' own counters: engine_metrics_interval above 0, "
    "SGLang with --enable-metrics and without other clients"
)
_UNHEEDED = {
    PriorityState.IGNORES: "the order in which engines admit shows nothing of it",
    PriorityState.REFUSED: "engines refuse the field, so they are not sent it",
}
_START_WITH = "start vLLM with --scheduling-policy priority (SGLang: --enable-priority-scheduling), or set it to auto"
#: Out of the rotation by its own fault. An endpoint that an operator drains is not.
DOWN = frozenset({Condition.UNHEALTHY, Condition.EJECTED, Condition.BREAKER_OPEN})
#: A share of failed requests from here on is a finding (and so many of them), and from there on a problem. The alert
#: KvproxyErrors has the first of them too.
FAILED_SHARE, FAILED_LEAST, FAILED_MOST = 0.05, 3, 0.5
#: A loss of a cache explains what follows for so long.
_LOSS_SHOWN_S = 600.0
_LOST = {
    LossReason.RESTARTED: "restarted",
    LossReason.CLEARED: "dropped its cache (its KV events say so)",
    LossReason.FORGOT: "lost its cache (it reused nothing of what it was sent just then)",
    LossReason.ASLEEP: "gave its cache up when it was put to sleep",
}
#: Streams of KV events connect, and fall behind, for a moment in all innocence.
_STREAM_PATIENCE_S = 10.0
#: Named one by one; of more in a cluster there is one finding.
_NAMED = 3
_PROBE = {"unreachable": "it cannot be reached", "timeout": "no answer in time", "failed": "it answers, with an error"}
_DOCTOR = "read the engine's log, or run `kvproxy doctor`"
_SEVERITIES = ("problem", "error", "warning", "note", "ok")


def find_unlearned(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """A finding for every cluster that decides by speeds and has seen none for long."""
    for name, cluster in clusters.items():
        speeds = cluster.speeds
        if speeds is None or speeds.requests_without_sample < NOTABLE_REQUESTS:
            continue
        believed = (
            "speeds are the defaults, alike for all" if speeds.learning else "what was learned of slow ones fades"
        )
        what = f"no sample of the engines' speeds in {speeds.requests_without_sample:,} requests: {believed}"
        yield ConfigFinding("warning", f"clusters.{name}", what, _FIX)


def find_unheeded_priority(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """A finding for every cluster with engines that are told a priority by `on` and do not go by it."""
    for name, cluster in clusters.items():
        told = [one for one in cluster.endpoints if one.priority.mode is EnginePriorityMode.ON]
        for state, what in _UNHEEDED.items():
            if unheeding := [one for one in told if one.priority.state is state]:
                text = f"engine_priority is on, and {what} ({_names(unheeding)})"
                yield ConfigFinding("warning", f"clusters.{name}", text, _START_WITH)


class Rank(IntEnum):
    """What hurts most comes first."""

    DOWN = 0
    SOURCES = 1
    FAILED = 2
    REST = 3


@dataclass(frozen=True, slots=True)
class Trouble:
    """One finding; a FindingLike. `key` is what it is about: its age goes on while that stays."""

    key: tuple[str, ...]
    rank: Rank
    severity: str
    where: str
    what: str
    fix: str = ""
    patience_s: float = 0.0  # shown once it has lasted so long


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
            if len(down) <= _NAMED:
                for one in down:
                    yield _down(("down", name, str(one.id)), f"{name}/{one.id}", f"{_why(one, now)}; {others}")
            else:
                what = f"{len(down)} of {len(cluster.endpoints)} endpoints are down ({_names(down)}); {others}"
                yield _down(("down", name), name, what)

    def _sources(self, now: float) -> Iterator[Trouble]:
        kvcache = self._operated.kvcache
        if kvcache is None:
            return
        for outage in kvcache.breakers.outages:
            what = f"{outage.operation} fails: {outage.meaning} (last error: {outage.last_error})"
            yield _source(("outage", outage.operation), "kvcache", what, "is it up? `kvproxy doctor` asks it")
        for name, cluster in self._operated.clusters.items():
            yield from _streams(kvcache.overlap.streams, name, cluster, now)
            yield from _asleep(name, cluster, now)
            for one in kvcache.overlap.indexes[name].missed.raised():
                yield _disbelieved(name, one)
            for endpoint in cluster.endpoints:
                loss = kvcache.state.losses.latest(name, endpoint.id)
                if loss is not None and loss.age_s <= _LOSS_SHOWN_S and not endpoint.asleep:
                    where = f"{name}/{endpoint.id}"
                    yield Trouble(("loss", name, str(endpoint.id)), Rank.REST, "note", where, _LOST[loss.reason])

    def _rest(self) -> Iterator[Trouble]:
        kvcache = self._operated.kvcache
        alarms: Sequence[OperatorFinding] = () if kvcache is None else kvcache.state.predictions.alarms()
        unknown = find_unlearned(self._operated.clusters)
        unheeded = find_unheeded_priority(self._operated.clusters)
        for kind, found in (
            ("alarm", alarms),
            ("speeds", unknown),
            ("priority", unheeded),
            ("finding", self._operated.findings),
        ):
            for one in found:
                # Alarms and speeds count in their text; findings of one place may be several.
                about = (kind, one.where, one.what) if kind == "finding" else (kind, one.where)
                yield Trouble(about, Rank.REST, str(one.severity), one.where, one.what, one.fix)


def _down(key: tuple[str, ...], where: str, what: str) -> Trouble:
    return Trouble(key, Rank.DOWN, "problem", where, what, _DOCTOR)


def _source(key: tuple[str, ...], where: str, what: str, fix: str, *, patience_s: float = 0.0) -> Trouble:
    return Trouble(key, Rank.SOURCES, "warning", where, what, fix, patience_s)


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
    return f"{_names(busy)} took over" if busy else f"{_names(up)} would take its requests"


def _names(endpoints: Sequence[Endpoint]) -> str:
    named = ", ".join(one.id for one in endpoints[:_NAMED])
    return f"{named} and {len(endpoints) - _NAMED} more" if len(endpoints) > _NAMED else named


def _streams(streams: EventStreams | None, name: str, cluster: Cluster, now: float) -> Iterator[Trouble]:
    if streams is None:
        return
    broken: list[tuple[Endpoint, str]] = []
    for one in cluster.endpoints:
        if one.condition(now) not in DOWN:
            states = streams.streams(one).values()
            reasons = [each.reason.value for each in states if each.state is not StreamState.EXACT]
            broken += [(one, reasons[0].replace("_", " "))] if reasons else []
    effect = "what it holds is known only by what was routed there"
    fix = "is its events port open? `kvproxy doctor` listens to it"
    for one, reason in broken if len(broken) <= _NAMED else ():
        key, where = ("stream", name, str(one.id)), f"{name}/{one.id}"
        yield _source(key, where, f"KV events: {reason}; {effect}", fix, patience_s=_STREAM_PATIENCE_S)
    if len(broken) > _NAMED:
        what = f"KV events of {len(broken)} endpoints ({_names([one for one, _ in broken])}): {broken[0][1]}; {effect}"
        yield _source(("stream", name), name, what, fix, patience_s=_STREAM_PATIENCE_S)


def _asleep(name: str, cluster: Cluster, now: float) -> Iterator[Trouble]:
    sleeping = [one for one in cluster.endpoints if one.condition(now) is Condition.ASLEEP]
    if sleeping:
        verb, whose = ("sleeps", "its") if len(sleeping) == 1 else ("sleep", "their")
        what = f"{_names(sleeping)} {verb}, as {whose} own metrics say: left out"
        fix = "wake it (`POST /wake_up`), or take it out of the configuration"
        yield _source(("asleep", name), name, what, fix)


def _disbelieved(name: str, one: MissedReuse) -> Trouble:
    what = (
        f"its KV events announce less than it reuses ({one.announced_tokens:,} of {one.reused_tokens:,} tokens; "
        f"{one.count} of the last {WINDOW}): what was routed there counts instead"
    )
    fix = "it may name blocks in a way that is not understood, or see other prompts: `kvproxy doctor` listens to it"
    return _source(("missed", name, str(one.endpoint)), f"{name}/{one.endpoint}", what, fix)


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
