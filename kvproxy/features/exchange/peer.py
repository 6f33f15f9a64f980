"""State of one peer at the receiver: its batches in order, missing ones, its delay and completeness."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec

from kvproxy.features.exchange import deltas
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
#: Window of completeness.
WINDOW_S = 60.0

_LAGS = 512
_OFFSET_S = 30.0
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
        now: float,
    ) -> None:
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
        self.early_bytes = 0  # of batches that wait for an earlier one, and of a standing that is not whole
        self.dropped = 0  # of these, for which there was no room
        self._ask = ask
        self._has_room = has_room
        self._was_told = was_told
        self._next: int | None = None  # number of the next batch; None: earlier ones unknown
        self._held: dict[int, tuple[Batch, int]] = {}
        self._said_s = -math.inf  # its clock, at the latest of its messages
        self._full = False  # a batch found no room: missing ones are not requested one by one
        self._asked_at: float | None = None
        self._asks = self._summed = 0  # so often; the last batch of which sums are known already
        self._unsure = False  # it was presumed dead and has to send its state
        self._ahead = 0  # heartbeats in a row behind the number assumed here
        self._standing: list[tuple[PeerSnapshot, int]] = []
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=256)  # time, prompts sent, prompts lost so far

    @property
    def waits(self) -> int:
        """Batches that wait for an earlier one."""
        return len(self._held)

    @property
    def in_order(self) -> bool:
        """Nothing is known to be missing."""
        return self._asked_at is None and self._next is not None

    def begin(self) -> None:
        """Begin with a new peer, whose first batch is number 1."""
        self._next = 1

    def take(self, message: Batch | PeerSnapshot, size_bytes: int, now: float) -> None:
        """Take a message, which is held while earlier ones are missing."""
        if isinstance(message, Batch):
            self._take_batch(message, size_bytes, now)
        else:
            self._stand(message, size_bytes, now)

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
            if batch.seq not in self._held and self._make_room(size_bytes):
                self._held[batch.seq] = batch, size_bytes
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
            self._marks.append((now, beat.told, self.lost))

    def _contradict(self, seq: int) -> None:
        """Discard batches beyond the peer's own heartbeats, which repeatedly were not its own."""
        self.heard.bound_rows(seq)
        for held in [held for held in self._held if held > seq + _FAR]:
            self._take_held(held)
        self._ahead = self._ahead + 1 if self._next is not None and self._next > seq + 1 else 0
        if self._ahead >= _BEATS:
            self._next = None
            self._ahead = 0
            self._unsure = True

    def _stand(self, standing: PeerSnapshot, size_bytes: int, now: float) -> None:
        """Its own word of how it stands: what was missing before, and cannot be sent again, is not waited for. Of one
        that finds no room the rest of the requests under way counts as over."""
        if self._standing and self._standing[0][0].seq != standing.seq:
            self._forget_standing()
        if standing.more:
            if self._make_room(size_bytes):
                self._standing.append((standing, size_bytes))
            return
        parts = [*(part for part, _ in self._standing), standing]
        self._forget_standing()
        self._unsure = False
        whole = msgspec.structs.replace(
            standing,
            open=[one for part in parts for one in part.open],
            loads=[one for part in parts for one in part.loads],
        )
        if self._next is None and standing.oldest == 1:
            self._next, self._summed = 1, standing.seq if self._was_told() else 0
        if self._next is not None and standing.oldest <= self._next <= standing.seq:
            self.heard.resume(whole, now)
            self._asks = 0
            self._request(now)  # the batches, which can be sent again
        elif self._next is None or self._next <= standing.seq + 1:
            self._jump(whole, now)

    def _jump(self, standing: PeerSnapshot, now: float) -> None:
        lost = self.heard.stand(standing, now)
        self.lost += lost if self._next is not None else 0
        self._next = standing.seq + 1
        self._asked_at = None
        self._asks = 0
        self._full = False
        for seq in [seq for seq in self._held if seq <= standing.seq]:
            self._take_held(seq)
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
        self._held.clear()
        self._standing.clear()
        self.early_bytes = 0
        self._full = False
        self.heard.leave(now)

    def completeness(self, now: float) -> tuple[int, int]:
        """Return the prompts it sent in the last minute, and those of them never received."""
        while len(self._marks) > 1 and now - self._marks[1][0] > WINDOW_S:
            self._marks.popleft()
        if not self._marks:
            return 0, 0
        (_, told, lost), (_, latest, lost_by_now) = self._marks[0], self._marks[-1]
        return latest - told, lost_by_now - lost

    def _apply(self, batch: Batch, now: float) -> None:
        self._next = batch.seq + 1
        self._said_s = batch.sent_s
        known = _SUMS if batch.seq <= self._summed else ()
        late = self.lag.late_s(batch.sent_s, now) > _LATE_S
        self.heard.apply((one for one in batch.deltas if not isinstance(one, known)), now, late=late)

    def _go_on(self, now: float) -> None:
        while self._next is not None and self._next in self._held:
            batch = self._take_held(self._next)
            self.heard.load(batch.loads, batch.seq, now)  # again: an earlier one may have come after it
            self._apply(batch, now)
        if self._held:
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
        in_short = self._unsure or self._asks > ASKS or self._full
        self._full = False
        self._ask(0 if in_short or self._next is None else self._next)

    def _make_room(self, size_bytes: int) -> bool:
        if not self._has_room(size_bytes):
            self.dropped += 1
            self._full = True
            return False
        self.early_bytes += size_bytes
        return True

    def _take_held(self, seq: int) -> Batch:
        batch, size_bytes = self._held.pop(seq)
        self.early_bytes -= size_bytes
        return batch

    def _forget_standing(self) -> None:
        self.early_bytes -= sum(size_bytes for _, size_bytes in self._standing)
        self._standing.clear()


class Lag:
    """How long after it was sent what comes is here, without a common clock: beyond the fastest of late, and half the
    fastest way there and back."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_LAGS)
        self.round_trip_s = 0.0  # the least seen; 0: none yet
        self._least = self._least_before = float("inf")  # difference of the clocks and the way, now and before
        self._since = 0.0

    def observe(self, sent_s: float, now: float) -> float:
        """Observe a message by its age on the sender's clock."""
        difference = now - sent_s
        if now - self._since > _OFFSET_S:
            self._least_before = self._least
            self._least = difference
            self._since = now
        self._least = min(self._least, difference)
        late_s = self.late_s(sent_s, now)
        self.seconds.append(late_s)
        return late_s

    def late_s(self, sent_s: float, now: float) -> float:
        """Return how late a message is, which is not observed."""
        return now - sent_s - min(self._least, self._least_before) + 0.5 * self.round_trip_s

    def went_around(self, seconds: float) -> None:
        """Record a round-trip time sample."""
        if seconds >= 0.0:
            self.round_trip_s = min(self.round_trip_s, seconds) if self.round_trip_s else seconds

    def quantile(self, share: float) -> float:
        """Of the latest messages; 0 before the first."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
