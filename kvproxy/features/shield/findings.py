"""The known faults of this fleet's engines, for the live page and `kvproxy doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvproxy.cluster.cluster import Cluster
from kvproxy.features.shield.rules import ADVISORIES, VLLM, open_rules, parse_version
from kvproxy.features.shield.settings import ShieldMode
from kvproxy.operate.runtime.operated import ConfigFinding

_DONE = {
    ShieldMode.WARN: "such requests are counted and pass (`shield: refuse` stops them)",
    ShieldMode.REFUSE: "such requests go to an engine without the fault, or are refused",
}
UNKNOWN = "the version of {} is not known, so its faults are not either"
ASK = "does `GET /version` answer there? A build from a source tree without tags has no version that means anything"
_NAMED = 3


def find_open_faults(clusters: Mapping[str, Cluster], mode: ShieldMode) -> Iterator[ConfigFinding]:
    """Yield a finding for each fault of each cluster, and one for engines of an unknown version."""
    for name, cluster in clusters.items():
        software = {str(one.id): one.software for one in cluster.engines if one.software is not None}
        where = f"cluster {name}"  # as of the doctor, so that its finding at the start is the same
        for what, fix in describe_faults(software, mode):
            yield ConfigFinding("note", where, what, fix)
        if unknown := list_unknown(software):
            yield ConfigFinding("note", where, UNKNOWN.format(list_first(unknown)), ASK)


def describe_faults(software: Mapping[str, str], mode: ShieldMode) -> Iterator[tuple[str, str]]:
    """Yield each fault and its remedy. Faults without a fixed release are in the documentation alone."""
    reported = set(software.values()) - {""}
    for rule, row in ADVISORIES.items():
        kinds = sorted(one for one in reported if rule in open_rules(one))
        if kinds and row.fixed is not None:
            affected = [name for name, one in software.items() if one in kinds]
            what = f"{list_first(affected)} ({list_first(kinds)}): {row.field}: {row.harm}; {_DONE[mode]}"
            fix = f"upgrade to {VLLM} {'.'.join(map(str, row.fixed[:3]))} or later"
            yield what, f"{fix} ({row.source})" if row.source else fix


def list_unknown(software: Mapping[str, str]) -> list[str]:
    """Return the engines that report no version, or one that means nothing."""
    reported = set(software.values())
    unknown = {one for one in reported if not one or (one.startswith(VLLM) and not _is_version(one))}
    return [name for name, one in software.items() if one in unknown]


def _is_version(software: str) -> bool:
    return parse_version(software.partition(" ")[2]) is not None


def list_first(names: Iterable[str]) -> str:
    """Return the first few, and how many more."""
    first = list(names)
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return ", ".join(first[:_NAMED]) + more
