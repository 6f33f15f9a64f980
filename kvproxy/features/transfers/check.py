"""A check of `kvproxy doctor`: can KV be copied between instances here?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.base.settings.compose import part_of
from kvproxy.features.transfers.feature import TransferPlace
from kvproxy.operate.doctor.lmcache import LmcacheCheck
from kvproxy.operate.doctor.report import Finding, ok, warning


@dataclass(frozen=True, slots=True)
class TransfersCheck(LmcacheCheck):
    """The service's ways to copy, against the settings."""

    name = "actions"
    calls = 4

    async def collect_findings(self) -> Sequence[Finding]:
        wanted = part_of(self.lmcache.settings, TransferPlace).transfers.on_demand
        return [judge_transfers(self.where, await self.lmcache.find_copying(), wanted=wanted)]


def judge_transfers(where: str, lever: str, *, wanted: bool) -> Finding:
    """`lever`: how KV can be copied between instances here; "": it cannot."""
    if lever:
        return ok(where, f"KV can be transferred: {lever}")
    if not wanted:
        return ok(where, "KV cannot be transferred: no store that instances share is known, and none reads another's")
    fix = (
        "coordinator: give the servers one --l2-adapter with `shared: true` and --coordinator-l2-event-reporting, or "
        "--p2p-advertise-url; controller: enable_p2p at the engines; or leave out `transfers`"
    )
    return warning(where, "has nothing that KV could be transferred from: `transfers` does nothing", fix)
