"""Lives of other processes: those that are known, and those that fell silent."""

from __future__ import annotations

from collections.abc import Callable

from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.wire import Origin

#: Missed heartbeats after which a peer is dead.
MISSED = 3
#: Time after which silent peers are forgotten, and bound on their number.
FORGET_S = 600.0
MAX_PEERS = 256


class Lives:
    """Peers by host and worker; `make` makes one, of which True: its life begins now."""

    def __init__(self, make: Callable[[Origin, bool, float], Peer], *, beat_s: float) -> None:
        self.known: dict[tuple[str, int], Peer] = {}
        self._make = make
        self._beat_s = beat_s

    @property
    def living(self) -> list[Peer]:
        """Peers that are alive."""
        return [peer for peer in self.known.values() if peer.alive]

    def consistency_ratio(self, now: float) -> float:
        """Return the share of the prompts sent by living peers in the last minute that arrived here."""
        found = [peer.completeness.count(now) for peer in self.living]
        told = sum(one for one, _ in found)
        return 1.0 if not told else max(0.0, 1.0 - sum(lost for _, lost in found) / told)

    def end_silent(self, now: float) -> None:
        """End peers that fell silent, and forget those that did long ago."""
        for peer in list(self.known.values()):
            silent_s = now - peer.heard_at
            if peer.alive and silent_s > MISSED * self._beat_s:
                peer.die(now)
            elif silent_s > FORGET_S:
                self.end(peer.origin, now)

    def meet(self, origin: Origin, now: float, *, begins: bool, beats: bool) -> Peer | None:
        """Return the peer if it lives: one that `begins` or `beats`, unless a later life of the same place does."""
        known = self.known.get(origin.place)
        if known is not None and known.alive and known.origin.epoch >= origin.epoch:
            return known if known.origin == origin else None
        if not (begins or beats):
            return None
        if known is not None and known.origin == origin:
            known.revive(now)
            return known
        if known is not None:
            self.end(known.origin, now)
        if len(self.known) >= MAX_PEERS:
            return None
        peer = self.known[origin.place] = self._make(origin, begins, now)
        return peer

    def end(self, origin: Origin, now: float) -> None:
        """End a life."""
        known = self.known.get(origin.place)
        if known is not None and known.origin == origin:
            known.end(now)
            del self.known[origin.place]
