"""What became of prefixes by their age: still there, or gone. Pure.

Ages are in bins of an eighth of an octave of blocks; a capacity that begins with bin n keeps what is in lower ones.
"""

from __future__ import annotations

import math

#: Bins of an octave.
PER_OCTAVE = 8
_BINS = 40 * PER_OCTAVE
#: Each fate weighs so much more than the one before: about the last 300 count.
_GROWTH = 1.003
_WEIGHT_BOUND = 1e9


class ReuseHistogram:
    """Counts, in which the latest fate is 1 and older ones fade."""

    def __init__(self) -> None:
        self._kept = [0.0] * _BINS
        self._gone = [0.0] * _BINS
        self._weight = 1.0  # of the latest; older ones stay as they are

    def kept(self, at: int) -> None:
        """A prefix of this age was still there."""
        self._age()
        self._kept[at] += self._weight

    def gone(self, at: int) -> None:
        """A prefix of this age was gone."""
        self._age()
        self._gone[at] += self._weight

    def pardon(self, at: int) -> None:
        """One of the latest that were gone had another reason."""
        self._gone[at] = max(0.0, self._gone[at] - self._weight)

    def seen(self, start: int, stop: int) -> float:
        """Fates of these ages, from `start` to before `stop`."""
        return sum(self._kept[start:stop] + self._gone[start:stop]) / self._weight

    def gone_from(self, at: int) -> float:
        """Prefixes of this age or older that were gone."""
        return sum(self._gone[at:]) / self._weight

    def best(self, low: int, high: int, *, near: int) -> tuple[int, float]:
        """The capacity from `low` to `high` that contradicts the fewest fates, of several the one nearest to `near`;
        and how many fewer than `near` does."""
        wrong = sum(self._kept[low:])
        best, least, there = near, math.inf, 0.0
        for at in range(low, high + 1):
            if at == near:
                there = wrong
            if (wrong, abs(at - near)) < (least, abs(best - near)):
                best, least = at, wrong
            wrong += self._gone[at] - self._kept[at]
        return best, (there - least) / self._weight

    def _age(self) -> None:
        self._weight *= _GROWTH
        if self._weight > _WEIGHT_BOUND:
            for bins in (self._kept, self._gone):
                bins[:] = [each / self._weight for each in bins]
            self._weight = 1.0


def age_bin(blocks: int) -> int:
    """The bin an age falls into."""
    return int(PER_OCTAVE * math.log2(blocks)) if blocks > 1 else 0


def capacity_bin(blocks: int) -> int:
    """The bin that a capacity begins with, or nearly so."""
    return round(PER_OCTAVE * math.log2(blocks)) if blocks > 1 else 0


def capacity_of(at: int) -> int:
    """Blocks of a capacity that begins with this bin."""
    return round(math.exp2(at / PER_OCTAVE))
