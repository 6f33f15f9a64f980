"""What an engine itself says its prefills took, held against the requests that ended there. Pure.

An answer that is not streamed hides its first token, but engines add the prefill time of every finished request to a
histogram. Its growth from one reading to the next, beside the work of the requests that ended meanwhile, is a sample.
The two counts are compared first: other clients of the engine are in the histogram, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.balancing.load import NO_WORK, EndpointLoad, Reservation, sum_of

#: Counts may differ by this share of the engine's: some requests end between a reading and the end of their answer.
TOLERANCE = 0.2

#: Readings whose counts do not agree are added up, this many at most; then what they say is dropped.
MAX_READINGS = 6

#: A sample stands for the requests in it, but for no more than these: the next reading may see another speed.
MAX_WEIGHT = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's counters of finished prefills since its start."""

    prefills: int
    seconds: float


NOTHING_READ = Reading(0, 0.0)


class EndedWork:
    """The requests that ended at one endpoint since a reading that agreed with them. Samples go to whoever hears those
    of its `load`."""

    __slots__ = ("_before", "_hidden", "_load", "_readings", "_work")

    def __init__(self, load: EndpointLoad) -> None:
        self._load = load
        self._before: Reading | None = None  # what growth is counted from
        self._work, self._hidden, self._readings = NO_WORK, 0, 0

    def add(self, reservation: Reservation) -> None:
        """This request was served to its end."""
        self._work = sum_of(self._work, reservation.features)
        self._hidden += reservation.hidden

    def read(self, reading: Reading, now: float) -> None:
        """The engine's counters, read just now. What they say is a sample unless first tokens taught all of it."""
        before, (requests, *_) = self._before, self._work
        if before is None or reading.prefills < before.prefills:  # another process than before
            self._begin(reading)
            return
        prefills, seconds = reading.prefills - before.prefills, reading.seconds - before.seconds
        if not requests or abs(prefills - requests) > TOLERANCE * prefills:
            self._readings += 1
            if self._readings >= MAX_READINGS:
                self._begin(reading)
            return
        work, weight = self._work, min(self._hidden, MAX_WEIGHT)
        self._begin(reading)
        learn = self._load.on_sample
        if learn is None or seconds <= 0.0:
            return
        mean = (1.0, work[1] / requests, work[2] / requests, work[3] / requests)
        for _ in range(weight):
            learn(mean, seconds / prefills, now, scraped=True)

    def _begin(self, reading: Reading) -> None:
        self._before = reading
        self._work, self._hidden, self._readings = NO_WORK, 0, 0
