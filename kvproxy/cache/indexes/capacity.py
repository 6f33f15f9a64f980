"""Capacity of an engine in blocks, learned from its reuse of routed prompts. Pure.

A configured or scraped capacity is often off: other clients share the cache, answers take room too, bytes only estimate
tokens. Each response is evidence: a prefix last requested so many blocks ago (its age) was still there, so the capacity
is larger, or was gone, so it is smaller. The estimate is the capacity that contradicts the fewest of these, which other
reasons for a loss do not move as long as most prefixes of that age are still there."""

from __future__ import annotations

import math

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry

#: Bins of an octave.
PER_OCTAVE = 8
_BINS = 40 * PER_OCTAVE
#: Each outcome weighs so much more than the one before: about the last 300 count.
_GROWTH = 1.003
_WEIGHT_BOUND = 1e9
#: Bounds of the estimate as a factor of the reported value, and the blocks it never exceeds on its own.
MOST_FACTOR = 8
MOST_BLOCKS = 1 << 20
#: Contradictions that another capacity must spare before it is taken.
_MARGIN = 2.5
#: Prefixes still there at the far end before more is tried, and outcomes beyond it that are answer enough.
_TRY_AFTER = 2
_TRIED = 1.5
#: Bins that are added at once, and as many before the end are the far end.
_STEP = _FAR = PER_OCTAVE // 4
#: Losses in a row, and those among them of recently requested prefixes, that no capacity explains.
_LOST = 8
_LOST_YOUNG = 3
#: Reuse may be lower than the held tokens by whole blocks of the engine and by the last one, which is always computed.
_SLACK_BLOCKS = 2
#: A shorter held prefix is no evidence.
_LEAST_BLOCKS = 3
#: An index this full has dropped some of its endpoint's blocks.
_FULL = 0.9


class Capacities:
    """Sizes the index. Without `learning` an endpoint's capacity is what was reported."""

    def __init__(self, index: ApproximateIndex, *, learning: bool = True) -> None:
        self.learning = learning
        self._index = index
        self._learned: dict[EndpointId, LearnedCapacity] = {}  # at most as many as the index has endpoints

    def set_reported(self, endpoint: EndpointId, blocks: int) -> None:
        """Set the capacity from the engine's metrics."""
        known = self._known(endpoint)
        known.set_reported(blocks)
        self._index.set_capacity(endpoint, known.blocks)

    def observe_reuse(self, entry: SpeculativeEntry, reused_blocks: int) -> bool:
        """Learn from the leading blocks that the response to this entry's request reused; before the entry is settled.
        Returns True if the engine lost its cache, which clears the index."""
        lru = entry.lru
        if not self.learning or lru is None or not lru.capacity:  # settled, void, or no evidence
            return False
        endpoint = entry.endpoint
        known = self._learned.get(endpoint) or self._known(endpoint)
        held = len(entry.cursor.hashes) - entry.new_blocks
        full = reused_blocks > held and lru.blocks >= _FULL * lru.capacity
        before = known.blocks
        lost = known.observe_reuse(
            age_blocks=entry.age_blocks, known_blocks=held, reused_blocks=reused_blocks, full=full
        )
        if known.blocks != before:
            self._index.set_capacity(endpoint, known.blocks)
        if lost:
            self._index.clear(endpoint)
        return lost

    def reported_blocks(self, endpoint: EndpointId) -> int:
        """Blocks the endpoint has room for by what its engine reported."""
        known = self._learned.get(endpoint)
        return self._index.counts.capacity(endpoint) if known is None else known.reported

    def forget_endpoint(self, endpoint: EndpointId) -> None:
        """Forget an endpoint that left or is another engine now."""
        self._learned.pop(endpoint, None)

    def _known(self, endpoint: EndpointId) -> LearnedCapacity:
        known = self._learned.get(endpoint)
        if known is None:
            known = self._learned[endpoint] = LearnedCapacity(self._index.counts.capacity(endpoint))
        return known


class LearnedCapacity:
    """One endpoint's. `blocks` begins as what is reported and stays within a factor of 8 of it; reported 0, it is 0."""

    def __init__(self, reported: int) -> None:
        self.reported = reported
        self.blocks = reported
        self.least = _least(reported)
        self._reset()

    def set_reported(self, blocks: int) -> None:
        """Set the capacity as configured, or from the engine's metrics. The learned value stays, unless this is another
        cache altogether."""
        if not blocks or not 0.5 <= self.reported / blocks <= 2.0:
            self._reset()
            self.blocks = blocks
        elif self.blocks == self.reported:
            self.blocks = blocks
        self.reported = blocks
        self.least = _least(blocks)
        self.blocks = self._bounded(self.blocks)

    def observe_reuse(self, *, age_blocks: int | None, known_blocks: int, reused_blocks: int, full: bool) -> bool:
        """Learn from the leading blocks of its prompt that a response reused.

        Its endpoint was estimated to hold `known_blocks`, the last of which had been asked for `age_blocks` ago (None:
        it is not certain that it ever had them); `full` shows that others had to be forgotten. True: the engine lost
        what it held (a restart, a cleared cache), whatever its capacity."""
        if not self.reported:
            return False
        slack = (known_blocks >> 3) + _SLACK_BLOCKS
        if age_blocks is not None and known_blocks >= _LEAST_BLOCKS:
            if reused_blocks + slack < known_blocks or not reused_blocks:
                return self._observe_evicted(age_blocks)
            if age_blocks >= self.least:  # no capacity there can be is less
                self._observe_hit(age_blocks)
            elif self._losses:
                self._losses.clear()
        if full and reused_blocks > known_blocks + slack:
            self._forgotten += 1
            self._try_more(capacity_bin(self.blocks))
        return False

    def _observe_hit(self, age: int) -> None:
        self._losses.clear()
        at = age_bin(age)
        current = capacity_bin(self.blocks)
        self._reuses.add_hit(at)
        if at >= current:
            self._reconsider(current)
        if at >= current - _FAR:
            self._try_more(current)

    def _observe_evicted(self, age: int) -> bool:
        del self._losses[: 1 - 2 * _LOST]
        self._losses.append(age)
        if len(self._losses) >= _LOST and sum(each < self.least for each in self._losses) >= _LOST_YOUNG:
            for each in self._losses:
                self._reuses.discount_evicted(age_bin(each))
            self._losses.clear()
            return True
        if age >= self.least:
            at = age_bin(age)
            current = capacity_bin(self.blocks)
            self._reuses.add_evicted(at)
            if at >= current - _FAR:
                self._far -= 1
            self._reconsider(current)
        return False

    def _reconsider(self, current: int) -> None:
        best, spared = self._reuses.find_best(capacity_bin(self.least), capacity_bin(self._most), near=current)
        if spared >= _MARGIN:
            self._set_blocks(capacity_of(best))

    def _try_more(self, current: int) -> None:
        """Try a larger capacity if the oldest prefixes, or ones the index had forgotten, were still there."""
        self._far += 1
        if self._far >= _TRY_AFTER and self._reuses.count_between(current, current + _STEP) < _TRIED:
            doubtless = self._forgotten and self._reuses.evicted_from(current - PER_OCTAVE) < 1.0
            self._set_blocks(round(self.blocks * math.exp2((2 if doubtless else 1) * _STEP / PER_OCTAVE)))

    def _set_blocks(self, blocks: int) -> None:
        self.blocks = self._bounded(blocks)
        self._far = self._forgotten = 0

    def _bounded(self, blocks: int) -> int:
        return max(self.least, min(blocks, self._most))

    @property
    def _most(self) -> int:
        return max(self.reported, min(self.reported * MOST_FACTOR, MOST_BLOCKS))

    def _reset(self) -> None:
        self._reuses = ReuseHistogram()
        self._losses: list[int] = []  # ages of blocks evicted since the last hit, the latest 16
        self._far = 0  # hits at the far end since the estimate changed, minus evictions there
        self._forgotten = 0  # of these, hits that the index had forgotten


def _least(reported: int) -> int:
    return -(-reported // MOST_FACTOR)


class ReuseHistogram:
    """Reused prefixes by their age: still there (a hit), or evicted. The latest counts 1 and older ones fade.

    Ages are in bins of an eighth of an octave of blocks; a capacity that begins with bin n keeps what is in lower ones.
    """

    def __init__(self) -> None:
        self._hit = [0.0] * _BINS
        self._evicted = [0.0] * _BINS
        self._weight = 1.0  # of the latest; older ones stay as they are

    def add_hit(self, at: int) -> None:
        """Count a prefix of this age that was still there."""
        self._age()
        self._hit[at] += self._weight

    def add_evicted(self, at: int) -> None:
        """Count a prefix of this age that was evicted."""
        self._age()
        self._evicted[at] += self._weight

    def discount_evicted(self, at: int) -> None:
        """One of the latest that were evicted was lost for another reason."""
        self._evicted[at] = max(0.0, self._evicted[at] - self._weight)

    def count_between(self, start: int, stop: int) -> float:
        """Prefixes of these ages, from `start` to before `stop`."""
        return sum(self._hit[start:stop] + self._evicted[start:stop]) / self._weight

    def evicted_from(self, at: int) -> float:
        """Prefixes of this age or older that were evicted."""
        return sum(self._evicted[at:]) / self._weight

    def find_best(self, low: int, high: int, *, near: int) -> tuple[int, float]:
        """Return the capacity from `low` to `high` that contradicts the fewest of them, of several the one nearest to
        `near`; and how many fewer than `near` does."""
        wrong = sum(self._hit[low:])
        best = near
        least = math.inf
        there = 0.0
        for at in range(low, high + 1):
            if at == near:
                there = wrong
            if (wrong, abs(at - near)) < (least, abs(best - near)):
                best = at
                least = wrong
            wrong += self._evicted[at] - self._hit[at]
        return best, (there - least) / self._weight

    def _age(self) -> None:
        self._weight *= _GROWTH
        if self._weight > _WEIGHT_BOUND:
            for bins in (self._hit, self._evicted):
                bins[:] = [each / self._weight for each in bins]
            self._weight = 1.0


def age_bin(blocks: int) -> int:
    """Return the bin an age falls into."""
    return int(PER_OCTAVE * math.log2(blocks)) if blocks > 1 else 0


def capacity_bin(blocks: int) -> int:
    """Return the bin that a capacity begins with, or nearly so."""
    return round(PER_OCTAVE * math.log2(blocks)) if blocks > 1 else 0


def capacity_of(at: int) -> int:
    """Blocks of a capacity that begins with this bin."""
    return round(math.exp2(at / PER_OCTAVE))
