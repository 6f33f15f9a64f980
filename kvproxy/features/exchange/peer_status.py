"""Status of other processes: metrics, and the same for people; and detection of a process with the same name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.features.exchange.datagrams import Link
from kvproxy.features.exchange.journal import Journal
from kvproxy.features.exchange.metrics import SyncMetrics
from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.peers import Peers, SyncStatus
from kvproxy.features.exchange.wire import Heartbeat, Message, Origin

log = logging.getLogger("kvproxy.sync")

#: Heartbeats that may still come from a life of this process that just ended.
_BEATS = 3

Series = Iterable[tuple[tuple[str, ...], float]]


def bind_gauges(
    metrics: Metrics,
    peers: Peers,
    journal: Journal,
    links: Sequence[Link],
    *,
    status: Callable[[], SyncStatus],
    blocks: Callable[[], int],
    clock: Clock,
) -> None:
    """Bind the gauges to these objects."""
    shown = metrics.group(SyncMetrics)

    def by_peer(figure: Callable[[Peer], int]) -> Series:
        return [((str(peer.origin),), float(figure(peer))) for peer in list(peers.known.values())]

    def by_state() -> Series:
        alive = len(peers.living)
        return [(("alive",), float(alive)), (("silent",), float(len(peers.known) - alive))]

    for state in SyncStatus:
        shown.status.labels(state.value).set_function(partial(_is, status, state))
    shown.consistency.set_source(lambda: [((), peers.lives.consistency_ratio(clock()))])
    shown.peers.set_source(by_state)
    shown.lag.set_source(lambda: _lags(peers))
    shown.gaps.set_source(lambda: by_peer(lambda peer: peer.gaps))
    shown.lost.set_source(lambda: by_peer(lambda peer: peer.lost))
    shown.index_blocks.set_source(lambda: [(("self",), float(blocks())), *by_peer(lambda peer: peer.blocks)])
    shown.dropped.set_source(
        lambda: [
            (("deltas",), float(journal.dropped)),
            (("messages",), float(sum(link.dropped for link in links))),
            (("failed",), float(sum(peer.heard.failed for peer in list(peers.known.values())))),
        ]
    )
    shown.held.set_source(lambda: [((what,), float(held)) for what, held in _held_bytes(peers, journal, links).items()])


def _held_bytes(peers: Peers, journal: Journal, links: Sequence[Link]) -> Mapping[str, int]:
    return {
        "deltas": journal.waiting.held_bytes,
        "unsent": sum(link.held_bytes for link in links),
        "sent": peers.own.sent.held_bytes,
        "joining": peers.newcomer.snapshot_bytes,
    }


def _is(status: Callable[[], SyncStatus], state: SyncStatus) -> float:
    return float(status() is state)


def _lags(peers: Peers) -> Series:
    for peer in list(peers.known.values()):
        for share in (0.5, 0.99):
            yield (str(peer.origin), f"{share:g}"), peer.lag.quantile(share)


def describe(
    peers: Peers, journal: Journal, links: Sequence[Link], status: SyncStatus, now: float
) -> dict[str, object]:
    """For people."""
    return {
        "status": status.value,
        "origin": str(peers.origin),
        "consistency_ratio": round(peers.lives.consistency_ratio(now), 4),
        "waiting": len(journal.waiting),
        "held_bytes": _held_bytes(peers, journal, links),
        "dropped": journal.dropped + sum(link.dropped for link in links),
        "links": {link.name: link.connected for link in links},
        "peers": [_describe(peer, now) for peer in peers.known.values()],
    }


def _describe(peer: Peer, now: float) -> dict[str, object]:
    told, lost = peer.completeness.count(now)
    return {
        "origin": str(peer.origin),
        "alive": peer.alive,
        "heard_s_ago": round(now - peer.heard_at, 3),
        "lag_p50_s": round(peer.lag.quantile(0.5), 6),
        "lag_p99_s": round(peer.lag.quantile(0.99), 6),
        "round_trip_s": round(peer.lag.round_trip_s, 6),
        "gaps": peer.gaps,
        "lost": peer.lost,
        "told_last_minute": told,
        "lost_last_minute": lost,
        "waiting": peer.waiting,
        "unknown": peer.heard.unknown,
        "failed": peer.heard.failed,
        "open": len(peer.heard.requests.open),
        "index_blocks": peer.blocks,
    }


class IdCollision:
    """Detects another living process with the name of this one: each then ignores the other's messages."""

    def __init__(self, origin: Origin, *, beat_s: float, clock: Clock) -> None:
        self._own = origin
        self._beat_s = beat_s
        self._clock = clock
        self._heard_at = -math.inf
        self._beats: BoundedMapping[Origin, int] = BoundedMapping(64)

    def hear(self, message: Message) -> None:
        """Handle an incoming message; one's own come back as well."""
        if not isinstance(message, Heartbeat) or message.origin.place != self._own.place or message.origin == self._own:
            return
        beats = self._beats[message.origin] = self._beats.get(message.origin, 0) + 1
        if beats >= _BEATS:
            self._heard_at = self._clock()
        if beats == _BEATS:
            log.warning(
                "another process has the name %s, so that each ignores the other's messages: set sync.replica to a "
                "name of its own in each (an earlier life of this one that still drains will end)",
                self._own,
            )

    @property
    def lives(self) -> bool:
        """True if the other process sent a heartbeat recently."""
        return self._clock() - self._heard_at <= _BEATS * self._beat_s
