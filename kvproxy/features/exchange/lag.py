"""Delay of a peer's messages, and their completeness."""

from __future__ import annotations

from collections import deque

#: Window of completeness.
WINDOW_S = 60.0
_LAGS = 512
_OFFSET_S = 30.0


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


class Completeness:
    """Prompts that a peer has sent of late, and those of them that never came."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=256)  # time, prompts sent, prompts lost so far

    def mark(self, now: float, told: int, lost: int) -> None:
        """Note how many there are so far."""
        self._marks.append((now, told, lost))

    def count(self, now: float) -> tuple[int, int]:
        """Return the prompts it sent in the last minute, and those of them never received."""
        marks = self._marks
        while len(marks) > 1 and now - marks[1][0] > WINDOW_S:
            marks.popleft()
        if not marks:
            return 0, 0
        (_, told, lost), (_, latest, lost_by_now) = marks[0], marks[-1]
        return latest - told, lost_by_now - lost
