"""Events of endpoints and of sources of facts in the last hour, one line each. Bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from kvproxy.cluster.endpoint import DOWN, Condition
from kvproxy.operate.runtime.operated import AdminTarget, Conditions, Event

#: Seconds for which an event is shown, and bound on the events kept.
KEPT_S = 3600.0
KEPT = 200
_BAD = "down"
_WARN = "warn"
_GOOD = "good"
_NEUTRAL = ""


class EventLog:
    """Compares the present with what was there a second ago; `since` is when an endpoint became what it is."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._conditions: dict[tuple[str, str], tuple[str, float]] = {}
        self._lost: dict[str, str] = {}

    def follow(self, now: float, conditions: Conditions) -> None:
        """Note what changed since the last call."""
        self._follow_endpoints(now, conditions)
        self._follow_sources(now)

    def list_events(self) -> Iterable[Event]:
        """Return all events, with the reloads among them."""
        reloader = self._operated.reloader
        return self._events if reloader is None else [*self._events, *reloader.events]

    def down_since(self) -> float | None:
        """When the first of the endpoints that are down now went down; None: none is."""
        return min((since for kind, since in self._conditions.values() if kind == "down"), default=None)

    def _follow_endpoints(self, now: float, conditions: Conditions) -> None:
        present = dict(_list_kinds(conditions))
        changed: dict[tuple[str, str], list[str]] = {}
        for key, kind in present.items():
            before, since = self._conditions.get(key, ("up", now))
            if kind != before:
                changed.setdefault((key[0], kind), []).append(key[1])
            self._conditions[key] = (kind, since if kind == before else now)
        for key in self._conditions.keys() - present.keys():
            del self._conditions[key]
        for (cluster, kind), names in changed.items():
            self._events.append(_of_endpoints(now, self._where(cluster), kind, names))

    def _follow_sources(self, now: float) -> None:
        kvcache = self._operated.kvcache
        outages = () if kvcache is None else kvcache.breakers.outages
        lost = {one.operation: one.last_error for one in outages}
        for operation in lost.keys() - self._lost.keys():
            self._events.append(Event(now, _WARN, f"{operation} lost: {lost[operation]}"))
        for operation in self._lost.keys() - lost.keys():
            self._events.append(Event(now, _GOOD, f"{operation} works again"))
        self._lost = lost

    def _where(self, cluster: str) -> str:
        return f"{cluster}/" if len(self._operated.clusters) > 1 else ""


_KINDS: Mapping[Condition, str] = {
    Condition.DRAINING: "drained",
    Condition.ASLEEP: "asleep",
    Condition.NOT_READY: "not ready",
    **dict.fromkeys(DOWN, "down"),
}
_MARKS = {"down": _BAD, "up": _GOOD, "drained": _NEUTRAL, "asleep": _WARN, "not ready": _WARN}
_NAMED = 3


def _list_kinds(conditions: Conditions) -> Iterator[tuple[tuple[str, str], str]]:
    for name, found in conditions.items():
        for endpoint, condition in found.items():
            yield (name, str(endpoint.id)), _KINDS.get(condition, "up")


def _of_endpoints(now: float, where: str, kind: str, names: list[str]) -> Event:
    named = ", ".join(f"{where}{one}" for one in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return Event(now, _MARKS[kind], f"{named}{more} {kind}")


def describe_events(events: Iterable[Event], now: float) -> list[dict[str, object]]:
    """Those of the last hour, the newest first, as the page has them."""
    recent = sorted((one for one in events if now - one.at <= KEPT_S), key=lambda one: -one.at)
    return [{"ago_s": now - one.at, "kind": one.kind, "what": one.what} for one in recent]
