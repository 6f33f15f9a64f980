"""State of one peer at the receiver: its batches in order, missing ones, its delay and completeness."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvproxy.features.exchange import deltas
from kvproxy.features.exchange.early import EarlyMessages
from kvproxy.features.exchange.lag import Completeness, Lag
from kvproxy.features.exchange.peer_applier import PeerApplier
from kvproxy.features.exchange.wire import Batch, Heartbeat, Origin, PeerSnapshot

#: Pause before a missing batch is requested again, and requests after which a snapshot is requested instead.
ASK_AGAIN_S = 0.1
ASKS = 3
#: Heartbeats in a row that are trusted against earlier messages; batches this far ahead of one are not the peer's own.
_BEATS = 2
_FAR = 1000
#: A heartbeat is late by no more; an older one was sent by another clock, and counts.
_STALE_S = 60.0
#: A batch that is later than that is one of a time that is over, as those that a newcomer is sent.
_LATE_S = 2.0
#: Sums: a snapshot has them whole.
_SUMS = deltas.Spent, deltas.Sample


class Peer:
    """`ask` wants batches from a number on, or (0) how it stands; `has_room` shows whether so many bytes that came too
    early may be held; `was_told`: a snapshot was taken over. Times are of the receiver's clock."""

    def __init__(
        self,
        origin: Origin,
        heard: PeerApplier,
        *,
        ask: Callable[[int], None],
        has_room: Callable[[int], bool],
        was_told: Callable[[], bool],
        begins: bool,
        now: float,
    ) -> None:
        """`begins`: its first batch is number 1."""
        self.origin = origin
        self.heard = heard
        self.alive = True
        self.heard_at = now
        self.gaps = self.lost = self.mismatches = 0  # lost: prompts never received
        self.blocks = 0  # in its approximate indexes, by its report
        self.joining = False
        self.beat_sent_s: float | None = None  # its clock, at its latest beat
        self.beat_at = now  # ours, when that came
        self.lag = Lag()
        self.completeness = Completeness()
        self.early = EarlyMessages(has_room)
        self._ask = ask
        self._was_told = was_told
        self._next: int | None = 1 if begins else None  # number of the next batch; None: earlier ones unknown
        self._said_s = -math.inf  # its clock, at the latest of its messages
        self._asked_at: float | None = None
        self._asks = self._summed = 0  # so often; the last batch of which sums are known already
        self._unsure = False  # it was presumed dead and has to send its state
        self._ahead = 0  # heartbeats in a row behind the number assumed here

    @property
    def in_order(self) -> bool:
        """Nothing is known to be missing."""
        return self._asked_at is None and self._next is not None

    def take(self, message: Batch | PeerSnapshot, size_bytes: int, now: float) -> None:
        """Take a message, which is held while earlier ones are missing."""
        if isinstance(message, Batch):
            self._take_batch(message, size_bytes, now)
        elif (standing := self.early.join_parts(message, size_bytes)) is not None:
            self._stand(standing, now)

    def _take_batch(self, batch: Batch, size_bytes: int, now: float) -> None:
        """Whenever it comes: loads count at once, deltas in their order and once."""
        late_s = self.lag.observe(batch.sent_s, now)
        if self._next is None and batch.seq == 1:
            self._next = 1
        if self._next is not None and batch.seq < self._next:
            return
        self.heard.load(batch.loads, batch.seq, now - late_s)
        if self._next == batch.seq:
            self._apply(batch, now)
            self._go_on(now)
        else:
            self.early.hold(batch, size_bytes)
            self._miss(now)

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Handle a heartbeat, which shows its last batch: the end of the stream may have been lost."""
        if not 0 <= self._said_s - beat.sent_s < _STALE_S:
            self._said_s = beat.sent_s
        elif self._next is None or beat.seq + 1 < self._next:
            return  # a later message of the peer overtook it
        self.blocks = beat.blocks
        self.joining = beat.joining
        self.beat_sent_s = beat.sent_s
        self.beat_at = now
        self.lag.observe(beat.sent_s, now)
        self._contradict(beat.seq)
        if self._next is None and not beat.seq:
            self._next = 1
        if self._next is None or beat.seq >= self._next:
            self._miss(now)
            return
        if self.in_order and beat.seq == self._next - 1:
            if (beat.told, beat.digest) != (self.heard.told, self.heard.digest):
                self.mismatches += 1
                self.heard.told = beat.told
                self.heard.digest = beat.digest
            if self.heard.unsure:
                self._unsure = True
                self._request(now)
            self.completeness.mark(now, beat.told, self.lost)

    def _contradict(self, seq: int) -> None:
        """Discard batches beyond the peer's own heartbeats, which repeatedly were not its own."""
        self.heard.bound_rows(seq)
        self.early.forget_batches(range(seq + _FAR + 1, 1 << 64))
        self._ahead = self._ahead + 1 if self._next is not None and self._next > seq + 1 else 0
        if self._ahead >= _BEATS:
            self._next = None
            self._ahead = 0
            self._unsure = True

    def _stand(self, standing: PeerSnapshot, now: float) -> None:
        """Its own word of how it stands: what was missing before, and cannot be sent again, is not waited for."""
        self._unsure = False
        if self._next is None and standing.oldest == 1:
            self._next, self._summed = 1, standing.seq if self._was_told() else 0
        if self._next is not None and standing.oldest <= self._next <= standing.seq:
            self.heard.resume(standing, now)
            self._asks = 0
            self._request(now)  # the batches, which can be sent again
        elif self._next is None or self._next <= standing.seq + 1:
            self._jump(standing, now)

    def _jump(self, standing: PeerSnapshot, now: float) -> None:
        lost = self.heard.stand(standing, now)
        self.lost += lost if self._next is not None else 0
        self._next = standing.seq + 1
        self._asked_at = None
        self._asks = 0
        self.early.full = False
        self.early.forget_batches(range(standing.seq + 1))
        self._go_on(now)

    def look(self, now: float) -> None:
        """Request missing batches again, from time to time."""
        if self._asked_at is not None and self.alive and now - self._asked_at >= ASK_AGAIN_S:
            self._request(now)

    def revive(self, now: float) -> None:
        """Revive a peer that was presumed dead: its load counts again, after the missed batches."""
        self.alive = True
        self._asks = 0
        self._unsure = True
        self._request(now)

    def die(self, now: float) -> None:
        """Handle a peer that was silent for too long."""
        self.alive = False
        self._asked_at = None
        self.early.clear()
        self.heard.leave(now)

    def _apply(self, batch: Batch, now: float) -> None:
        self._next = batch.seq + 1
        self._said_s = batch.sent_s
        known = _SUMS if batch.seq <= self._summed else ()
        late = self.lag.late_s(batch.sent_s, now) > _LATE_S
        self.heard.apply((one for one in batch.deltas if not isinstance(one, known)), now, late=late)

    def _go_on(self, now: float) -> None:
        for batch in self.early.take_from(self._next):
            self.heard.load(batch.loads, batch.seq, now)  # again: an earlier one may have come after it
            self._apply(batch, now)
        if self.early.batches:
            self._miss(now)
        elif self._next is not None and not self._unsure:
            self._asked_at = None
            self._asks = 0

    def _miss(self, now: float) -> None:
        if self._asked_at is None:
            self.gaps += self._next is not None
            self._request(now)

    def _request(self, now: float) -> None:
        self._asked_at = now
        self._asks += 1
        in_short = self._unsure or self._asks > ASKS or self.early.full
        self.early.full = False
        self._ask(0 if in_short or self._next is None else self._next)
