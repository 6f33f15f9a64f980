"""The exchange as operators see it: findings, `/sync`, and one account of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.operate.admin.findings import Trouble, source_trouble
from kvproxy.operate.admin.replies import RequestRefused, reply_json
from kvproxy.operate.commands.status import Cell, number, percent, plain, seconds, span, table
from kvproxy.operate.feature import StatusPart
from kvproxy.operate.merge import Rule, each, fields, keyed, largest, smallest, total, worst
from kvproxy.operate.runtime.operated import AdminTarget

if TYPE_CHECKING:
    from kvproxy.features.exchange.service import SyncService

#: From the best to the worst.
_STATES = ("synced", "alone", "joining", "degraded")
_PEER: Mapping[str, Rule] = {
    **dict.fromkeys(("gaps", "lost", "told_last_minute", "lost_last_minute", "waiting"), total),
    **dict.fromkeys(("heard_s_ago", "lag_p50_s", "lag_p99_s", "round_trip_s"), largest),
    "alive": all,
}
#: How what several workers know of the others becomes one account.
MERGED: Mapping[str, Rule] = {
    "status": worst(_STATES),
    "consistency_ratio": smallest,
    **dict.fromkeys(("waiting", "dropped"), total),
    "held_bytes": each(total),
    "namesake": any,
    "index_blocks": largest,
    "peers": keyed(("origin",), fields(_PEER)),
}


_SERVICE = "kvproxy.features.exchange.service"


def find_service(operated: AdminTarget) -> SyncService | None:
    """Return the exchange that this process takes part in."""
    if not any(type(one).__module__ == _SERVICE for one in operated.companions):
        return None  # so that it is not even imported
    from kvproxy.features.exchange.service import SyncService

    return next((one for one in operated.companions if isinstance(one, SyncService)), None)


def find_troubles(operated: AdminTarget) -> Iterator[Trouble]:
    """Yield what stands between this process and those that decide as one with it."""
    service = find_service(operated)
    if service is None:
        return
    if service.namesake.lives:
        what = f"another process has the name {service.origin} too: each ignores the other's messages"
        yield source_trouble(("namesake",), "sync", what, "set sync.replica to a name of its own in each")
    store = service.store
    if store is not None and not store.connected:
        what = f"{store.where} is away: each replica decides by its own state"
        yield source_trouble(("store",), "sync", what, "is it up? the log has the reason", patience_s=2.0)


def list_routes(operated: AdminTarget) -> Sequence[Route]:
    """Return `/sync`, which answers how it stands with the others."""

    async def answer(request: Request) -> Response:
        service = find_service(operated)
        if service is None:
            fix = "set sync.redis or sync.nats, or serve with several workers"
            raise RequestRefused(404, Problem("sync", "this process decides alone", fix))
        return reply_json(service.describe_state())

    return [Route("/sync", answer, methods=["GET"])]


_HEADS = ("process", "state", "heard", "lag p50", "p99", "gaps", "lost", "index blocks")


def show_peers(live: Mapping[str, Any], *, colour: bool) -> StatusPart:
    """Return a sentence on the whole, and a table of the others."""
    sync = live.get("sync")
    if sync is None:
        return StatusPart()
    away = "".join(f", {name} away" for name, connected in sync["links"].items() if not connected)
    known = f"{percent(sync['consistency_ratio'])} of what others routed is known here"
    others = sum(one["origin"] != sync["origin"] for one in sync["peers"])  # where workers answer together it is listed
    count = f"{others} other process{'' if others == 1 else 'es'}"
    sentence = plain(f"{sync['origin']} is {sync['status']} with {count}{away}: {known}")
    return StatusPart(blocks=([sentence], table(_HEADS, [_cells(one) for one in sync["peers"]], colour=colour)))


def _cells(peer: Mapping[str, Any]) -> list[Cell]:
    return [
        (peer["origin"], ""),
        ("alive", "good") if peer["alive"] else ("silent", "down"),
        (f"{span(peer['heard_s_ago'])} ago", ""),
        (seconds(peer["lag_p50_s"]), ""),
        (seconds(peer["lag_p99_s"]), ""),
        (str(peer["gaps"]), ""),
        (str(peer["lost"]), "warn" if peer["lost_last_minute"] else ""),
        (number(peer["index_blocks"]), ""),
    ]
