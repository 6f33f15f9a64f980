"""Prefixes requested so often that replicating them is an investment, not a waste."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import exp

from kvproxy.cache.indexes.radix import Node, PrefixCursor

#: A block is hot if one in this many requests uses it: requests decay by e over this many for each that makes it hot.
REQUESTS_TO_ONE = 32
#: Decayed requests per endpoint that make a block hot...
HOT_REQUESTS_PER_ENDPOINT = 2
#: ...of which this many are enough, unless there are more endpoints: then one for each.
ENOUGH_REQUESTS = 8
#: Steps of a run beyond which the less valuable ones are dropped.
_STEPS = 32
_NEGLIGIBLE = 0.01

#: Where a run's heat falls: blocks before, by how much, and as of which request.
Step = tuple[int, float, int]


class Run(Node):
    """Run of blocks with the endpoints that hold all of it, those with a request for all of it in flight, and the heat
    of its last block. Blocks before a step are hotter, by the step and those after it."""

    __slots__ = ("counted_at", "heat", "held_by", "in_flight_at", "steps")

    def __init__(self, hashes: array[int]) -> None:
        super().__init__(hashes)
        self.held_by = 0  # bits of endpoints
        self.in_flight_at = 0
        self.heat = 0.0
        self.counted_at = 0  # number of the request that the heat is as of
        self.steps: list[Step] | None = None  # rising; None for nearly all runs


class Heat:
    """Exponentially decayed requests by block, kept on the runs themselves: a block that leaves the tree is cold.

    A request counts once for all blocks of its prompt. Exact by block, however runs are split and put together.
    """

    def __init__(self, *, endpoints: int = 1) -> None:
        self._requests = 0
        self.endpoints = endpoints

    @property
    def endpoints(self) -> int:
        """Endpoints of the fleet; may be set at any time."""
        return self._endpoints

    @endpoints.setter
    def endpoints(self, endpoints: int) -> None:
        self._endpoints = endpoints
        #: Decayed requests that make a block hot at present.
        self.threshold = max(endpoints, min(HOT_REQUESTS_PER_ENDPOINT * max(1, endpoints), ENOUGH_REQUESTS))
        self._window = REQUESTS_TO_ONE * self.threshold

    def count_request(self, path: Sequence[Run]) -> None:
        """Count a request for the prompt of these runs."""
        self._requests += 1
        now = self._requests
        window = self._window
        for run in path:
            run.heat = run.heat * exp((run.counted_at - now) / window) + 1.0
            run.counted_at = now

    def begin_run(self, run: Run) -> None:
        """Begin a new run with its latest request."""
        run.heat = 1.0
        run.counted_at = self._requests

    def decayed_requests(self, run: Run) -> float:
        """Decayed requests for the last block of the run."""
        return run.heat * exp((run.counted_at - self._requests) / self._window)

    def hot_blocks(self, cursor: PrefixCursor[Run]) -> int:
        """Leading blocks that are hot, the cursor's request included."""
        asking = 0 if cursor.counted else 1
        enough = self.threshold - asking
        now = self._requests + asking
        window = self._window
        hot = 0
        for run in cursor.path:
            if run.heat < enough or run.heat * exp((run.counted_at - now) / window) < enough:  # heat only decays
                return hot + self._hot_before_steps(run, enough, now) if run.steps else hot
            hot += len(run.hashes)
        partial = cursor.partial
        if partial is not None:
            if partial.heat * exp((partial.counted_at - now) / window) >= enough:
                return hot + cursor.inside
            if partial.steps:
                return hot + min(cursor.inside, self._hot_before_steps(partial, enough, now))
        return hot

    def _hot_before_steps(self, run: Run, enough: int, now: int) -> int:
        heat = run.heat * exp((run.counted_at - now) / self._window)
        for end, more, since in reversed(run.steps or ()):
            heat += more * exp((since - now) / self._window)
            if heat >= enough:
                return end
        return 0

    def split_run(self, head: Run, tail: Run, at: int) -> None:
        """`head`, the first `at` blocks, was split off `tail`."""
        head.heat = tail.heat
        head.counted_at = tail.counted_at
        head.steps = tail.steps
        if tail.steps is not None:
            self.cut_run(head, at)
            tail.steps = [(end - at, more, since) for end, more, since in tail.steps if end > at] or None

    def cut_run(self, run: Run, keep: int) -> None:
        """Cut the blocks after the first `keep` off the run."""
        if run.steps is not None:
            window = self._window
            run.heat += sum(more * exp((at - run.counted_at) / window) for end, more, at in run.steps if end >= keep)
            run.steps = [step for step in run.steps if step[0] < keep] or None

    def absorb_leaf(self, run: Run, leaf: Run) -> None:
        """Absorb the blocks of `leaf`, which are about to be added to the end of the run."""
        now = self._requests
        window = self._window
        length = len(run.hashes)
        steps = run.steps or []
        if len(steps) > _STEPS:
            steps = [step for step in steps if step[1] * exp((step[2] - now) / window) > _NEGLIGIBLE]
        fall = run.heat * exp((run.counted_at - now) / window) - leaf.heat * exp((leaf.counted_at - now) / window)
        if leaf.steps:
            fall -= sum(more * exp((since - now) / window) for _, more, since in leaf.steps)
        if fall > 0.0:
            steps.append((length, fall, now))
        if leaf.steps:
            steps += [(length + end, more, since) for end, more, since in leaf.steps]
        run.heat = leaf.heat
        run.counted_at = leaf.counted_at
        run.steps = steps or None
