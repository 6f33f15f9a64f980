"""A check of `kvproxy doctor`: can KV be copied between instances here?"""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.base.settings.compose import part_of
from kvproxy.features.transfers.settings import TransferPlace
from kvproxy.operate.doctor.deployment import StoreFacts
from kvproxy.operate.doctor.report import Finding, check, ok, warning


@check("actions", calls=4)
async def check_transfers(store: StoreFacts) -> Sequence[Finding]:
    """Compare the service's ways to copy with the settings."""
    wanted = part_of(store.settings, TransferPlace).transfers.on_demand
    return [judge_transfers(store.where, await store.find_copying(), wanted=wanted)]


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
