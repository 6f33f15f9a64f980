"""State of one peer at the receiver: its batches in order, missing ones, its delay and completeness."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvproxy.features.exchange.lag import Completeness, Lag
from kvproxy.features.exchange.peer_applier import PeerApplier
from kvproxy.features.exchange.wire import Batch, Heartbeat, Origin, PeerSnapshot

#: Pauses before what is missing is requested again, doubling between these.
ASK_AGAIN_S = 0.1
LONGEST_PAUSE_S = 2.0
#: Heartbeats in a row that are trusted against earlier messages.
_BEATS = 2
#: A heartbeat is late by no more; an older one was sent by another clock, and counts.
_STALE_S = 60.0
#: A batch that is later than that is one of a time that is over, as those that a newcomer is sent.
_LATE_S = 2.0


class Peer:
    """Batches are applied in order, and those behind a missing one are let go: `ask` wants all from a number on (0:
    unknown), and is answered by these, as far as they can be sent again, and then by how the peer stands. Times are of
    the receiver's clock. `held`: this process joins, and takes the batches afterwards."""

    def __init__(
        self, origin: Origin, heard: PeerApplier, *, ask: Callable[[int], None], begins: bool, now: float
    ) -> None:
        """`begins`: its first batch is number 1."""
        self.origin = origin
        self.heard = heard
        self.alive = True
        self.heard_at = now
        self.gaps = self.lost = 0  # lost: prompts never received
        self.blocks = 0  # in its approximate indexes, by its report
        self.beat_sent_s: float | None = None  # its clock, at its latest beat
        self.beat_at = now  # ours, when that came
        self.lag = Lag()
        self.completeness = Completeness()
        self._ask = ask
        self._next: int | None = 1 if begins else None  # number of the next batch; None: earlier ones unknown
        self._latest = 0  # batch whose loads count
        self._fresh = True  # nothing of it was applied, so that all its batches may be
        self._said_s = -math.inf  # its clock, at the latest of its messages
        self._asked_at: float | None = None
        self._pause_s = ASK_AGAIN_S
        self._ahead = 0  # heartbeats in a row behind the number assumed here

    @property
    def in_order(self) -> bool:
        """Nothing is known to be missing."""
        return self._asked_at is None and self._next is not None

    @property
    def waiting(self) -> int:
        """Batches that it has sent and that are not applied."""
        return max(0, self._latest + 1 - (self._next or 1))

    def take_batch(self, batch: Batch, now: float, *, held: bool = False) -> None:
        """Whenever it comes: loads count at once, deltas in their order and once."""
        late_s = self.lag.observe(batch.sent_s, now)
        if batch.seq > self._latest:
            self._latest = batch.seq
            self._said_s = batch.sent_s
            self.heard.load(batch.loads, now - late_s)
        if held:
            return
        if self._next is None and self._fresh and batch.seq == 1:
            self._next = 1
        if self._next == batch.seq:
            self._next += 1
            self._fresh = False
            self.heard.apply(batch.deltas, now, late=late_s > _LATE_S)
        elif self._next is None or batch.seq > self._next:
            self._miss(now)

    def take_standing(self, standing: PeerSnapshot, now: float, *, held: bool = False) -> None:
        """Take its own report of how it stands: what was missing before, and cannot be sent again, is lost."""
        if standing.seq >= self._latest:
            self._latest = standing.seq
            self.heard.load(standing.loads, now)
        if self._fresh and self._next != 1 and standing.oldest == 1 and not held:
            self._next = 1
            self.heard.told = 0
            self._request(now)
        if self._next is None or self._next == standing.seq + 1 or self._next < standing.oldest:
            self._stand(standing, now, held=held)
        elif self._next <= standing.seq and not held:
            self._miss(now)  # the others can be sent again

    def _stand(self, standing: PeerSnapshot, now: float, *, held: bool) -> None:
        lost = self.heard.stand(standing, now)
        if lost is None:
            return
        self.lost += 0 if self._next is None else lost
        self._next = standing.seq + 1
        self._fresh = held
        self._asked_at = None
        self._pause_s = ASK_AGAIN_S

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Handle a heartbeat, which shows its last batch: the end of the stream may have been lost."""
        overtaken = 0 <= self._said_s - beat.sent_s < _STALE_S
        if not overtaken:
            self._said_s = beat.sent_s
            self._latest = min(self._latest, beat.seq)
        if self._next is not None and self._next > beat.seq + 1:
            if not overtaken:
                self._contradict(now)
            return
        self._ahead = 0
        self.blocks = beat.blocks
        self.beat_sent_s = beat.sent_s
        self.beat_at = now
        self.lag.observe(beat.sent_s, now)
        if self._next is None and not beat.seq:
            self._next = 1
        if self._next is None or beat.seq >= self._next:
            self._miss(now)
        elif self._asked_at is None:
            if self.heard.unsure:
                self._request(now)
            self.completeness.mark(now, beat.told, self.lost)

    def _contradict(self, now: float) -> None:
        """Discard a position beyond the peer's own heartbeats, if that is so repeatedly."""
        self._ahead += 1
        if self._ahead >= _BEATS:
            self._ahead = 0
            self._next = None
            self._request(now)

    def look(self, now: float) -> None:
        """Request what is missing again, from time to time."""
        if self._asked_at is not None and self.alive and now - self._asked_at >= self._pause_s:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._request(now)

    def revive(self, now: float) -> None:
        """Revive a peer that was presumed dead: its load counts again, after the missed batches."""
        self.alive = True
        self._request(now)

    def go_on(self, now: float, *, told: bool) -> None:
        """Take its batches after this process has joined; unless another `told` it the state, those of the time before
        that, too."""
        self._fresh = self._fresh and not told
        if self._fresh and self._next != 1:
            self._next = None
        if self.alive:
            self._request(now)

    def die(self, now: float) -> None:
        """Handle a peer that was silent for too long."""
        self.alive = False
        self._asked_at = None
        self.heard.hide_load(now)

    def end(self, now: float) -> None:
        """Handle the end of its life."""
        self.alive = False
        self.heard.leave(now)

    def _miss(self, now: float) -> None:
        if self._asked_at is None:
            self.gaps += self._next is not None
            self._request(now)

    def _request(self, now: float) -> None:
        self._asked_at = now
        self._ask(self._next or 0)
