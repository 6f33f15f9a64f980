"""What is seen of other processes: metrics, and the same for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvproxy.metrics.catalog import Metrics
from kvproxy.sync.datagrams import Link
from kvproxy.sync.journal import MAX_WAITING, Journal
from kvproxy.sync.peer import Peer
from kvproxy.sync.peers import Peers, SyncStatus
from kvproxy.types import Clock

Series = Iterable[tuple[tuple[str, ...], float]]


def show(
    metrics: Metrics,
    peers: Peers,
    journal: Journal,
    links: Sequence[Link],
    *,
    status: Callable[[], SyncStatus],
    blocks: Callable[[], int],
    clock: Clock,
) -> None:
    """The gauges read these from now on."""
    shown, bounds = metrics.sync, metrics.bounds

    def by_peer(figure: Callable[[Peer], int]) -> Series:
        return [((str(peer.origin),), float(figure(peer))) for peer in list(peers.known.values())]

    def by_state() -> Series:
        alive = len(peers.living)
        return [(("alive",), float(alive)), (("silent",), float(len(peers.known) - alive))]

    for state in SyncStatus:
        shown.status.labels(state.value).set_function(partial(_is, status, state))
    shown.consistency.set_source(lambda: [((), peers.consistency_ratio(clock()))])
    shown.peers.set_source(by_state)
    shown.lag.set_source(lambda: _lags(peers))
    shown.gaps.set_source(lambda: by_peer(lambda peer: peer.gaps))
    shown.lost.set_source(lambda: by_peer(lambda peer: peer.lost))
    shown.index_blocks.set_source(lambda: [(("self",), float(blocks())), *by_peer(lambda peer: peer.blocks)])
    shown.dropped.set_source(
        lambda: [(("deltas",), float(journal.dropped)), (("messages",), float(sum(link.dropped for link in links)))]
    )
    bounds.queue_depth.labels("sync").set_function(lambda: len(journal))
    bounds.queue_limit.labels("sync").set(MAX_WAITING)


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
        "consistency_ratio": round(peers.consistency_ratio(now), 4),
        "waiting": len(journal) + sum(link.waiting for link in links),
        "dropped": journal.dropped + sum(link.dropped for link in links),
        "links": {link.name: link.connected for link in links},
        "peers": [_describe(peer, now) for peer in peers.known.values()],
    }


def _describe(peer: Peer, now: float) -> dict[str, object]:
    told, lost = peer.completeness(now)
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
        "waiting": peer.waits,
        "unknown": peer.heard.unknown,
        "open": peer.heard.open,
        "index_blocks": peer.blocks,
    }
