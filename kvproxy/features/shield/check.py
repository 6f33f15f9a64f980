"""The doctor's check of the engines' versions."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.base.settings.compose import part_of
from kvproxy.features.shield.findings import ASK, UNKNOWN, describe_faults, list_first, list_unknown
from kvproxy.features.shield.settings import ShieldPlace
from kvproxy.features.shield.versions import fetch_software
from kvproxy.operate.doctor.deployment import ClusterFacts, gather_facts
from kvproxy.operate.doctor.report import Finding, check, ok, warning


@check("shield", calls=6)
async def check_faults(cluster: ClusterFacts) -> Sequence[Finding]:
    """One cluster's engines: the faults of their versions that requests can meet."""
    facts = await gather_facts(cluster.engines, lambda engine: fetch_software(engine.vllm))
    software = {engine.endpoint.id: one for engine, one in facts.items()}
    mode = part_of(cluster.deployment.config, ShieldPlace).shield
    found = [warning(cluster.where, what, fix) for what, fix in describe_faults(software, mode)]
    if unknown := list_unknown(software):
        found.append(ok(cluster.where, f"{UNKNOWN.format(list_first(unknown))}: {ASK}"))
    if software and not found:
        return [ok(cluster.where, "the engines' versions have no known fault that a release has mended")]
    return found
