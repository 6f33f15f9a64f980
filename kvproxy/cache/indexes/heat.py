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


class Run(Node):
    """Run of blocks with the endpoints that hold all of it, those with a request for all of it in flight, and the heat
    of its last block."""

    __slots__ = ("counted_at", "heat", "held_by", "in_flight_at")

    def __init__(self, hashes: array[int]) -> None:
        super().__init__(hashes)
        self.held_by = 0  # bits of endpoints
        self.in_flight_at = 0
        self.heat = 0.0
        self.counted_at = 0  # number of the request that the heat is as of

    def take_heat(self, other: Run) -> None:
        """Be as hot as the run that these blocks were split off, or whose blocks come to these."""
        self.heat = other.heat
        self.counted_at = other.counted_at


class Heat:
    """Exponentially decayed requests by block, kept on the runs themselves: a block that leaves the tree is cold.

    A request counts once for all blocks of its prompt. A chat that grew in one run is as hot as its last turn: one
    session's own turns make nothing hot that others ask for.
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
                return hot
            hot += len(run.hashes)
        partial = cursor.partial
        if partial is not None and partial.heat * exp((partial.counted_at - now) / window) >= enough:
            hot += cursor.inside
        return hot
