"""Which prefixes are asked for so often that replicating them is an investment, not a waste."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import exp

from kvproxy.prefix.approximate.radix import Node

#: Requests decay by e over this many requests per endpoint.
WINDOW_REQUESTS_PER_ENDPOINT = 64
#: Decayed requests per endpoint that make a block hot.
HOT_REQUESTS_PER_ENDPOINT = 2
#: Steps of a run beyond which those worth less than this are given up.
_STEPS, _NEGLIGIBLE = 32, 0.01

#: Where a run's heat falls: blocks before, by how much, and as of which request.
Step = tuple[int, float, int]


class HeatedRun(Node):
    """A run with the heat of its last block. What is before a step is hotter, by the step and those after it."""

    __slots__ = ("counted_at", "heat", "steps")

    def __init__(self, hashes: array[int]) -> None:
        super().__init__(hashes)
        self.heat = 0.0
        self.counted_at = 0  # number of the request that the heat is as of
        self.steps: list[Step] | None = None  # rising; None for nearly all runs


class Heat:
    """Exponentially decayed requests by block, kept on the runs themselves: a block that leaves the tree is cold.

    A request counts once for all blocks of its prompt. Exact by block, however runs are split and put together.
    """

    def __init__(self, *, endpoints: int = 1) -> None:
        self.endpoints = endpoints  # may be set at any time
        self._requests = 0

    @property
    def threshold(self) -> int:
        """Decayed requests that make a block hot at present."""
        return HOT_REQUESTS_PER_ENDPOINT * max(1, self.endpoints)

    def count(self, path: Sequence[HeatedRun]) -> None:
        """One request asked for the prompt that these runs are."""
        self._requests += 1
        now, window = self._requests, self._window
        for run in path:
            run.heat = run.heat * exp((run.counted_at - now) / window) + 1.0
            run.counted_at = now

    def begin(self, run: HeatedRun) -> None:
        """The run is new, by the latest request for it."""
        run.heat, run.counted_at = 1.0, self._requests

    def requests(self, run: HeatedRun) -> float:
        """Decayed requests for the last block of the run."""
        return run.heat * exp((run.counted_at - self._requests) / self._window)

    def hot_blocks(self, run: HeatedRun, *, asking: int = 0) -> int:
        """Leading blocks of the run that are hot, `asking` requests for it included that are not counted yet."""
        endpoints = max(1, self.endpoints)
        enough = HOT_REQUESTS_PER_ENDPOINT * endpoints - asking
        if run.heat < enough and run.steps is None:
            return 0  # heat only decays: no need to work out by how much
        now, window = self._requests + asking, WINDOW_REQUESTS_PER_ENDPOINT * endpoints
        heat = run.heat * exp((run.counted_at - now) / window)
        if heat >= enough:
            return len(run.hashes)
        for end, more, since in reversed(run.steps or ()):
            heat += more * exp((since - now) / window)
            if heat >= enough:
                return end
        return 0

    def split(self, head: HeatedRun, tail: HeatedRun, at: int) -> None:
        """`head`, the first `at` blocks, was split off `tail`."""
        head.heat, head.counted_at, head.steps = tail.heat, tail.counted_at, tail.steps
        if tail.steps is not None:
            self.cut(head, at)
            tail.steps = [(end - at, more, since) for end, more, since in tail.steps if end > at] or None

    def cut(self, run: HeatedRun, keep: int) -> None:
        """The blocks after the first `keep` are not the run's any more."""
        if run.steps is not None:
            window = self._window
            run.heat += sum(more * exp((at - run.counted_at) / window) for end, more, at in run.steps if end >= keep)
            run.steps = [step for step in run.steps if step[0] < keep] or None

    def absorb(self, run: HeatedRun, leaf: HeatedRun) -> None:
        """The blocks of `leaf` are about to be added to the end of the run."""
        now, length = self._requests, len(run.hashes)
        steps = run.steps or []
        if len(steps) > _STEPS:
            steps = [step for step in steps if step[1] * exp((step[2] - now) / self._window) > _NEGLIGIBLE]
        below = leaf.steps or []
        fall = (
            self.requests(run)
            - self.requests(leaf)
            - sum(more * exp((at - now) / self._window) for _, more, at in below)
        )
        if fall > 0.0:
            steps.append((length, fall, now))
        steps += [(length + end, more, since) for end, more, since in below]
        run.heat, run.counted_at, run.steps = leaf.heat, leaf.counted_at, steps or None

    @property
    def _window(self) -> int:
        return WINDOW_REQUESTS_PER_ENDPOINT * max(1, self.endpoints)
