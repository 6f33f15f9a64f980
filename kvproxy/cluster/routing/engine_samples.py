"""Speed samples from engines' own counters. Pure.

An answer that is not streamed hides its first token, but engines add the prefill time of every finished request to a
histogram. Its growth from one reading to the next, beside the work of the requests that ended meanwhile, is a sample.
Other clients of the engine are in the histogram, too: either the engine reports how many tokens all of them computed,
or its count of requests has to agree with ours."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.cluster.routing.load import EndpointLoad, Reservation
from kvproxy.cluster.routing.work import NO_WORK, Features, sum_of

#: Counts may differ by this share of the engine's: some requests end between a reading and the end of their answer.
TOLERANCE = 0.2

#: Readings whose counts do not agree are added up, at most this many; then they are dropped.
MAX_READINGS = 6

#: A sample has the weight of its requests, but at most this: the next reading may see another speed.
MAX_WEIGHT = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of an engine's finished prefills since its start. `computed_tokens` of their prompts were not cached;
    None: not reported."""

    prefills: int
    seconds: float
    computed_tokens: int | None = None


NOTHING_READ = Reading(0, 0.0)


class EndedWork:
    """The requests that ended at one endpoint since a reading that agreed with them. Samples go where those
    of its `load`."""

    __slots__ = ("_before", "_hidden", "_load", "_readings", "_work")

    def __init__(self, load: EndpointLoad) -> None:
        self._load = load
        self._before: Reading | None = None  # base of the growth
        self._work = NO_WORK
        self._hidden = 0
        self._readings = 0

    def add_request(self, reservation: Reservation) -> None:
        """Add a request that was served to its end. One without a known prompt (such as a list of models) is no
        prefill."""
        if reservation.uncached_tokens or reservation.cached_tokens:
            self._work = sum_of(self._work, reservation.features)
            self._hidden += reservation.hidden

    def read_counters(self, reading: Reading, now: float) -> None:
        """Read the engine's counters; their growth is a sample unless first tokens covered all of it."""
        before = self._before
        requests = self._work[0]
        if before is None or reading.prefills < before.prefills:  # another process than before
            self._begin(reading)
            return
        prefills = reading.prefills - before.prefills
        seconds = reading.seconds - before.seconds
        computed = _growth(before.computed_tokens, reading.computed_tokens)
        agrees = computed is not None or abs(prefills - requests) <= TOLERANCE * prefills
        if not requests or not prefills or not agrees:
            self._readings += 1
            if self._readings >= MAX_READINGS or not (requests or prefills):
                self._begin(reading)
            return
        work = mean_of(self._work, prefills, computed)
        weight = min(self._hidden, MAX_WEIGHT)
        self._begin(reading)
        learn = self._load.on_sample
        if learn is not None and seconds > 0.0:
            for _ in range(weight):
                learn(work, seconds / prefills, now, scraped=True)
                if self._load.watch is not None:
                    self._load.watch.sampled(work, seconds / prefills, scraped=True)

    def _begin(self, reading: Reading) -> None:
        self._before = reading
        self._work = NO_WORK
        self._hidden = 0
        self._readings = 0


def mean_of(work: Features, prefills: int, computed_tokens: int | None) -> Features:
    """Return the mean prefill: of our requests' `work`, with as many tokens as the engine reports that all of them
    computed."""
    requests, tokens, attention, lower = work
    ours = tokens / requests
    mean = ours if computed_tokens is None else computed_tokens / prefills
    return (1.0, mean, attention / requests * (mean / ours if ours else 1.0), lower / requests)


def _growth(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None or now < before else now - before
