"""Lives of other processes: those that are known, those that are over, and those that fell silent."""

from __future__ import annotations

from collections.abc import Callable

from kvproxy.base.bounded import BoundedMapping
from kvproxy.features.exchange.peer import Peer
from kvproxy.features.exchange.wire import Origin

#: Missed heartbeats after which a peer is dead.
MISSED = 3
#: Time after which silent peers are forgotten, and bound on their number.
FORGET_S = 600.0
MAX_PEERS = 256
#: Bound on early messages of all peers; those beyond it are dropped, and a snapshot is requested instead.
MAX_EARLY_BYTES = 32 * 1024 * 1024


class Lives:
    """Peers by host and worker; `make` makes one, of which True: its life begins now."""

    def __init__(self, make: Callable[[Origin, bool, float], Peer], *, beat_s: float) -> None:
        self.known: dict[tuple[str, int], Peer] = {}
        self._make = make
        self._beat_s = beat_s
        self._ended: BoundedMapping[Origin, None] = BoundedMapping(1024)  # lives that are over
        self._beats: BoundedMapping[Origin, int] = BoundedMapping(1024)  # heartbeats of ended lives

    @property
    def living(self) -> list[Peer]:
        """Peers that are alive."""
        return [peer for peer in self.known.values() if peer.alive]

    @property
    def early_bytes(self) -> int:
        """Of what came too early, of all peers."""
        return sum(peer.early.held_bytes for peer in list(self.known.values()))

    def has_room(self, size_bytes: int) -> bool:
        """Return whether so many bytes more that came too early may be held."""
        return self.early_bytes + size_bytes <= MAX_EARLY_BYTES

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
                del self.known[peer.origin.place]

    def find(self, origin: Origin) -> Peer | None:
        """Return the living peer of this very life."""
        peer = self.known.get(origin.place)
        return peer if peer is not None and peer.origin == origin and peer.alive else None

    def meet(self, origin: Origin, now: float, *, begins: bool, beats: bool) -> Peer | None:
        """Return the peer, a new one if need be; None: of a life that is over."""
        known = self.known.get(origin.place)
        if known is not None and known.origin == origin:
            return known
        over = origin in self._ended or (known is not None and not begins and origin.epoch < known.origin.epoch)
        if over and not (beats and self._beats_on(origin, known, now)):
            return None
        if known is not None:
            self.end(known.origin, now)
        if len(self.known) >= MAX_PEERS:
            return None
        peer = self._make(origin, begins, now)
        self.known[origin.place] = peer
        return peer

    def end(self, origin: Origin, now: float) -> None:
        """End a life for good."""
        self._ended[origin] = None
        known = self.known.get(origin.place)
        if known is not None and known.origin == origin:
            known.die(now)
            del self.known[origin.place]

    def _beats_on(self, origin: Origin, known: Peer | None, now: float) -> bool:
        """Return True if a life that was reported as ended goes on: it sends heartbeats, and another that took its
        place does not."""
        self._beats[origin] = beats = self._beats.get(origin, 0) + 1
        if beats < MISSED or (known is not None and now - known.heard_at <= MISSED * self._beat_s):
            return False
        self._ended.pop(origin, None)
        self._beats.pop(origin, None)
        return True
