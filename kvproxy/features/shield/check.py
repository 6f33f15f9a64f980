"""The doctor's check of the engines' versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.base.settings.compose import part_of
from kvproxy.features.shield.feature import ShieldPlace
from kvproxy.features.shield.findings import ASK, UNKNOWN, describe_faults, list_first, list_unknown
from kvproxy.features.shield.versions import fetch_software
from kvproxy.operate.doctor.deployment import ClusterCheck, gather_facts
from kvproxy.operate.doctor.report import Finding, ok, warning


@dataclass(frozen=True, slots=True)
class FaultsCheck(ClusterCheck):
    """One cluster's engines: the faults of their versions that requests can meet."""

    name = "shield"
    calls = 6

    async def collect_findings(self) -> Sequence[Finding]:
        facts = await gather_facts(self.engines, lambda engine: fetch_software(engine.vllm))
        software = {engine.endpoint.id: one for engine, one in facts.items()}
        mode = part_of(self.deployment.config, ShieldPlace).shield
        found = [warning(self.where, what, fix) for what, fix in describe_faults(software, mode)]
        if unknown := list_unknown(software):
            found.append(ok(self.where, f"{UNKNOWN.format(list_first(unknown))}: {ASK}"))
        if software and not found:
            return [ok(self.where, "the engines' versions have no known fault that a release has mended")]
        return found
