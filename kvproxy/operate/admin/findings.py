"""Findings about a cluster or its engines: speeds without samples, priorities without effect, ranks that requests
cannot name, missing adapters, reports that are not believed, lost caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.cache.feedback.trust import WINDOW, CacheLosses, LossReason, MissedReuse
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.feature import wakes_engines
from kvproxy.operate.runtime.operated import ConfigFinding

#: Findings named one by one; further ones in a cluster are one finding.
NAMED = 3


class Rank(IntEnum):
    """Order of findings, the most urgent first."""

    DOWN = 0
    SOURCES = 1
    FAILED = 2
    REST = 3


@dataclass(frozen=True, slots=True)
class Trouble:
    """One finding; an OperatorFinding. `key` is what it is about: its age goes on while that stays."""

    key: tuple[str, ...]
    rank: Rank
    severity: str
    where: str
    what: str
    fix: str = ""
    patience_s: float = 0.0  # minimum age of a finding to be shown


def list_names(endpoints: Sequence[Endpoint]) -> str:
    """Return the first few, and how many more."""
    named = ", ".join(one.id for one in endpoints[:NAMED])
    return f"{named} and {len(endpoints) - NAMED} more" if len(endpoints) > NAMED else named


def source_trouble(key: tuple[str, ...], where: str, what: str, fix: str, *, patience_s: float = 0.0) -> Trouble:
    """Return a source of facts that is lost or not trusted."""
    return Trouble(key, Rank.SOURCES, "warning", where, what, fix, patience_s)


def find_certificate_findings(certificates: CertificateWatch) -> Iterator[ConfigFinding]:
    """Certificates that cannot be used, and those that expire soon."""
    for one in certificates.list_findings():
        yield ConfigFinding("warning", one.place, one.what, one.fix)


#: Placements without a sample that are worth a finding.
NOTABLE_REQUESTS = 500
_FIX = (
    "stream answers, or let the kvcache filter read the engines' own counters: engine_metrics_interval above 0, "
    "SGLang with --enable-metrics and without other clients"
)


def find_unlearned(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """Return a finding for every cluster that decides by speeds and has seen none for long."""
    for name, cluster in clusters.items():
        speeds = cluster.speeds
        if speeds is None or speeds.requests_without_sample < NOTABLE_REQUESTS:
            continue
        believed = "all speeds are the defaults" if speeds.learning else "learned differences between engines fade"
        what = f"no sample of the engines' speeds in {speeds.requests_without_sample:,} requests: {believed}"
        yield ConfigFinding("warning", f"clusters.{name}", what, _FIX)


def find_unsteered_ranks(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """Return a finding for every engine with ranks that it refused, or that only its metrics show."""
    for name, cluster in clusters.items():
        for engine in cluster.engines:
            ranks = engine.ranks
            where = f"{name}/{engine.id}"
            if ranks.refused:
                what = f"the engine refused the data-parallel rank {_listed(ranks.refused)}, which gets no requests"
                yield ConfigFinding("warning", where, what, f"set data_parallel.ranks to {_listed(ranks.candidates)}")
            elif ranks.unknown and ranks.named is not None:
                what = (
                    f"it has the data-parallel ranks {_listed(ranks.shown)}, but requests cannot name one: a prefix is "
                    "computed once per rank"
                )
                fix = f"set data_parallel.ranks to {_listed(ranks.shown)}, or start it with --kv-events-config"
                yield ConfigFinding("warning", where, what, fix)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def find_lost_adapters(clusters: Mapping[str, Cluster]) -> Iterable[ConfigFinding]:
    """Return a finding for every cluster with adapters that its engines listed once, and none of them does now."""
    for name, cluster in clusters.items():
        if lost := sorted(cluster.adapters.lost):
            more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
            what = f"no engine serves the adapter {', '.join(lost[:NAMED])}{more} any longer: its requests fail"
            fix = "load it again (vLLM: POST /v1/load_lora_adapter, or --lora-modules), or inform its clients"
            yield ConfigFinding("warning", f"clusters.{name}", what, fix)


#: How long the loss of a cache explains later findings.
_LOSS_SHOWN_S = 600.0
_LOST = {
    LossReason.RESTARTED: "restarted",
    LossReason.CLEARED: "dropped its cache (reported by its KV events)",
    LossReason.FORGOT: "lost its cache (it reused nothing of a prompt sent shortly before)",
    LossReason.ASLEEP: "dropped its cache when it was put to sleep",
}


def list_engine_findings(
    kvcache: KvCache, name: str, cluster: Cluster, conditions: Mapping[Endpoint, Condition]
) -> Iterator[Iterable[Trouble]]:
    """Yield those of one cluster, each walk over its endpoints by itself."""
    yield _asleep(name, cluster, conditions)
    yield (_disbelieved(name, one) for one in kvcache.overlap.indexes[name].missed.doubted_records())
    yield _lost(kvcache.state.losses, name, conditions)


def _asleep(name: str, cluster: Cluster, conditions: Mapping[Endpoint, Condition]) -> Iterator[Trouble]:
    sleeping = [one for one, condition in conditions.items() if condition is Condition.ASLEEP]
    if sleeping and not wakes_engines(cluster.settings):
        verb, whose = ("sleeps", "its") if len(sleeping) == 1 else ("sleep", "their")
        what = f"{list_names(sleeping)} {verb} by {whose} own metrics: excluded from routing"
        fix = "wake it (`POST /wake_up`), or take it out of the configuration"
        yield source_trouble(("asleep", name), name, what, fix)


def _disbelieved(name: str, one: MissedReuse) -> Trouble:
    what = (
        f"its KV events announce less than it reuses ({one.announced_tokens:,} of {one.reused_tokens:,} tokens; "
        f"{one.count} of the last {WINDOW}): routed requests count instead"
    )
    fix = "it may name blocks in an unknown way, or see other prompts: `kvproxy doctor` checks it"
    return source_trouble(("missed", name, str(one.endpoint)), f"{name}/{one.endpoint}", what, fix)


def _lost(losses: CacheLosses, name: str, endpoints: Iterable[Endpoint]) -> Iterator[Trouble]:
    for endpoint in endpoints:
        loss = losses.latest_loss(name, endpoint.id)
        if loss is not None and loss.age_s <= _LOSS_SHOWN_S and not endpoint.asleep:
            where = f"{name}/{endpoint.id}"
            yield Trouble(("loss", name, str(endpoint.id)), Rank.REST, "note", where, _LOST[loss.reason])
