"""Its part of `kvproxy status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvproxy.operate.commands.status import Cell, number, percent, plain, seconds, span, table
from kvproxy.operate.feature import StatusPart

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
