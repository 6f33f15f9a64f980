"""The streams of a running proxy, as operators see them: those in trouble, and engines that publish."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.cluster.endpoint import DOWN, Endpoint
from kvproxy.features.kv_events.status import StreamState
from kvproxy.features.kv_events.streams import EventStreams
from kvproxy.operate.admin.findings import NAMED, Trouble, list_names, source_trouble
from kvproxy.operate.runtime.operated import AdminTarget

#: Streams that connect or fall behind for less long are normal.
_PATIENCE_S = 10.0
_EFFECT = "its cache is estimated from routed requests alone"
_FIX = "is its events port open? `kvproxy doctor` checks it"


def find_streams(operated: AdminTarget) -> EventStreams | None:
    """Return the streams that the proxy follows now."""
    reports = None if operated.kvcache is None else operated.kvcache.overlap.reports
    return reports if isinstance(reports, EventStreams) else None


def count_publishing(operated: AdminTarget) -> tuple[int, int]:
    """Return how many endpoints publish KV events, and how many there are."""
    streams = find_streams(operated)
    endpoints = [one for cluster in operated.clusters.values() for one in cluster.endpoints]
    return 0 if streams is None else sum(bool(streams.publishes(one)) for one in endpoints), len(endpoints)


def find_troubles(operated: AdminTarget) -> Iterator[Trouble]:
    """Yield the endpoints that take requests and whose streams are not exact; many in a cluster are one finding."""
    streams = find_streams(operated)
    now = operated.clock()
    for name, cluster in operated.clusters.items() if streams is not None else ():
        assert streams is not None
        broken: list[tuple[Endpoint, str]] = []
        for one in cluster.endpoints:
            states = streams.streams(one).values()
            reasons = [each.reason.value for each in states if each.state is not StreamState.EXACT]
            if reasons and one.condition(now) not in DOWN:
                broken.append((one, reasons[0].replace("_", " ")))
        for one, reason in broken if len(broken) <= NAMED else ():
            key = ("stream", name, str(one.id))
            where = f"{name}/{one.id}"
            yield source_trouble(key, where, f"KV events: {reason}; {_EFFECT}", _FIX, patience_s=_PATIENCE_S)
        if len(broken) > NAMED:
            silent = list_names([one for one, _ in broken])
            what = f"KV events of {len(broken)} endpoints ({silent}): {broken[0][1]}; {_EFFECT}"
            yield source_trouble(("stream", name), name, what, _FIX, patience_s=_PATIENCE_S)
