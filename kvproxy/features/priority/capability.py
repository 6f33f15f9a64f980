"""Text for people whether it is on, and for how many engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.operate.feature import OFF, ON, Capability

if TYPE_CHECKING:
    from kvproxy.operate.admin.operated import AdminTarget
    from kvproxy.operate.config.schema import Config

_GAIN = "`engine_priority: auto` has busy engines start the shortest prefill first"
_NAME = "engine priority"


def describe_capability(config: Config, operated: AdminTarget | None) -> Capability:
    """Return whether any engine may get a priority, and how many get one now."""
    clusters = config.clusters.values()
    own = (one.engine_priority for cluster in clusters for one in cluster.endpoints)
    modes = {*(cluster.engine_priority for cluster in clusters), *(one for one in own if one is not None)}
    modes.discard(EnginePriorityMode.OFF)
    if not modes:
        return Capability(_NAME, OFF, "`engine_priority: off`, the default", _GAIN)
    reason = f"`engine_priority: {'/'.join(sorted(modes))}`"
    if operated is None:
        return Capability(_NAME, ON, reason)
    from kvproxy.features.priority.engine_priority import priority_of  # `kvproxy check` needs no engines

    endpoints = [endpoint for cluster in operated.clusters.values() for endpoint in cluster.endpoints]
    now = operated.clock()
    sent = sum(told is not None and told.sends(now) for told in map(priority_of, endpoints))
    return Capability(_NAME, ON, f"{reason}, sent to {sent} of {len(endpoints)} endpoints now")
