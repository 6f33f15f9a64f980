"""How far one stream of KV events can be trusted, and why; and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.indexes.block_events import BlockRemoved, BlockStored, KvEvent
from kvproxy.features.kv_events.decoding import Skipped
from kvproxy.features.kv_events.metrics import KvEventMetrics


class StreamState(StrEnum):
    """Quality of an index fed by this stream; a metric label."""

    CONNECTING = "connecting"  # no data yet
    EXACT = "exact"  # every change since the engine's start (or its last clear) was applied
    DEGRADED = "degraded"  # followed, but something is missing or stale
    APPROXIMATE = "approximate"  # no usable stream: rely on routed requests


class StreamReason(StrEnum):
    """Why the stream is in its state."""

    STARTING = "starting"
    SYNCHRONISING = "synchronising"
    FOLLOWING = "following"
    DISCONNECTED = "disconnected"
    PARTIAL_HISTORY = "partial_history"  # the engine's replay buffer starts later than its cache
    NO_REPLAY = "no_replay"  # joined late, and the engine offers no replay
    LOST_EVENTS = "lost_events"  # a gap that replay could not fill
    REPLAY_FAILED = "replay_failed"  # will be tried again
    MALFORMED = "malformed"  # an event could not be read
    BEHIND = "behind"  # batches come faster than they are applied: the index is old
    SILENT = "silent"  # the engine prefills, but publishes no events
    FAILED = "failed"  # the subscription or its consumer raised; both start over


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """State and reason of one stream."""

    state: StreamState
    reason: StreamReason

    @property
    def troubled(self) -> bool:
        """True if the index misses something that the stream should bring."""
        return self.state in (StreamState.DEGRADED, StreamState.APPROXIMATE)


#: The worst stream decides the quality of an endpoint's index.
_WORST_FIRST = (StreamState.APPROXIMATE, StreamState.DEGRADED, StreamState.CONNECTING)


def index_worth(streams: dict[int, StreamStatus]) -> StreamState:
    """Return what an index fed by these streams is worth; without any, only what was routed is known."""
    if not streams:
        return StreamState.APPROXIMATE
    states = {one.state for one in streams.values()}
    return next((state for state in _WORST_FIRST if state in states), StreamState.EXACT)


class StreamHealth:
    """The facts a status follows from; `changed` is called once for each new status."""

    def __init__(
        self, *, changed: Callable[[StreamStatus], None], clock: Clock, silence_s: float, block_tokens: int
    ) -> None:
        self._changed = changed
        self._clock = clock
        self._silence_s = silence_s
        self._block_tokens = block_tokens
        self._ever_connected = False
        self._connected = False
        self._synchronised = False
        self._failed = False
        self._behind = False
        self._missing: StreamReason | None = None
        self._unanswered_since: float | None = None
        self._unanswered_blocks = 0
        self._silent = False
        self.status = StreamStatus(StreamState.CONNECTING, StreamReason.STARTING)
        self.troubled_since: float | None = clock()  # None: exact

    def mark_connected(self) -> None:
        """Note a new connection; a synchronisation follows."""
        self._ever_connected = self._connected = True
        self._settle()

    def mark_disconnected(self) -> None:
        """Note a lost connection: the index grows stale."""
        self._connected = self._synchronised = self._behind = False
        self._settle()

    def mark_synchronising(self) -> None:
        """Note that what was applied is void, and comes again."""
        self._synchronised = False
        self._settle()

    def mark_synchronised(self, missing: StreamReason | None) -> None:
        """Note that the stream is followed again; `missing` shows the unknown part of its history."""
        self._synchronised = True
        self._failed = False
        self._missing = missing
        self._settle()

    def mark_failed(self) -> None:
        """Note a subscription that ended by an error; the applied batches no longer count."""
        self._connected = self._synchronised = self._behind = False
        self._failed = True
        self._settle()

    def mark_incomplete(self, missing: StreamReason | None) -> None:
        """Change the unknown part of the history."""
        self._missing = missing
        self._settle()

    def fell_behind(self, behind: bool) -> bool:
        """Note whether batches come faster than they are applied; returns True if that is new."""
        if behind is self._behind:
            return False
        self._behind = behind
        self._settle()
        return True

    def record_batch(self) -> None:
        self._unanswered_since = None
        self._unanswered_blocks = 0
        if self._silent:
            self._silent = False
            self._settle()

    def record_traffic(self, uncached_tokens: int) -> None:
        """Note that the engine prefilled these many tokens: it must have stored their whole blocks and announced
        them."""
        blocks = uncached_tokens // self._block_tokens
        if blocks <= 0:
            return
        now = self._clock()
        if self._unanswered_since is None:
            self._unanswered_since = now
        self._unanswered_blocks += blocks
        if self._unanswered_blocks >= 4 and now - self._unanswered_since >= self._silence_s:
            self._silent = True
            self._settle()

    def _settle(self) -> None:
        status = self._derived()
        if status != self.status:
            self.status = status
            if status.state is StreamState.EXACT:
                self.troubled_since = None
            elif self.troubled_since is None:
                self.troubled_since = self._clock()
            self._changed(status)

    def _derived(self) -> StreamStatus:
        if self._silent:
            return StreamStatus(StreamState.APPROXIMATE, StreamReason.SILENT)
        if self._failed:
            return StreamStatus(StreamState.DEGRADED, StreamReason.FAILED)
        if not self._ever_connected:
            return StreamStatus(StreamState.CONNECTING, StreamReason.STARTING)
        if not self._connected:
            return StreamStatus(StreamState.DEGRADED, StreamReason.DISCONNECTED)
        if not self._synchronised:
            return StreamStatus(StreamState.CONNECTING, StreamReason.SYNCHRONISING)
        if self._missing is not None:
            return StreamStatus(StreamState.DEGRADED, self._missing)
        if self._behind:
            return StreamStatus(StreamState.DEGRADED, StreamReason.BEHIND)
        return StreamStatus(StreamState.EXACT, StreamReason.FOLLOWING)


class StreamMeter:
    """The catalogue's KV event metrics, bound to one endpoint and data-parallel rank."""

    def __init__(self, metrics: Metrics, endpoint: EndpointId, dp_rank: int, *, wall_clock: Clock) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._rank = str(dp_rank)
        self._wall_clock = wall_clock
        self._batches: dict[str, CounterCell] = {}  # by outcome
        self._stored = metrics.group(KvEventMetrics).blocks.labels(endpoint, "stored")
        self._removed = metrics.group(KvEventMetrics).blocks.labels(endpoint, "removed")
        self._behind = metrics.group(KvEventMetrics).behind.labels(endpoint)
        self._lag = metrics.group(KvEventMetrics).lag.labels(endpoint, self._rank)

    def count_batch(self, outcome: str) -> None:
        """One batch: applied, replayed, duplicate or malformed."""
        cell = self._batches.get(outcome)
        if cell is None:
            cell = self._batches[outcome] = self._metrics.group(KvEventMetrics).batches.labels(self._endpoint, outcome)
        cell.value += 1.0

    def count_events(self, events: Sequence[KvEvent]) -> None:
        """Events that were applied."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored.value += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._removed.value += len(event.block_hashes)

    def count_skipped(self, skipped: Skipped) -> None:
        """Events that could not be used."""
        for reason, count in skipped.items():
            self._metrics.group(KvEventMetrics).skipped.labels(self._endpoint, reason).inc(count)

    def count_gap(self, outcome: str) -> None:
        """Count a break in the numbering: filled, lost, or a restart of the engine."""
        self._metrics.group(KvEventMetrics).gaps.labels(self._endpoint, outcome).inc()

    def count_behind(self) -> None:
        """Batches come faster than they are applied."""
        self._behind.inc()

    def show_lag(self, published_at: float) -> None:
        """Seconds from publishing to having applied; includes the clocks' difference between the hosts."""
        self._lag.set(max(0.0, self._wall_clock() - published_at))

    def show_state(self, status: StreamStatus) -> None:
        """Show the stream's state."""
        for state in StreamState:
            self._metrics.group(KvEventMetrics).state.labels(self._endpoint, self._rank, state.value).set(
                state is status.state
            )

    def close(self) -> None:
        """Remove the gauges of a stream that ended; its counters stay."""
        self._metrics.group(KvEventMetrics).lag.remove(self._endpoint, self._rank)
        for state in StreamState:
            self._metrics.group(KvEventMetrics).state.remove(self._endpoint, self._rank, state.value)
