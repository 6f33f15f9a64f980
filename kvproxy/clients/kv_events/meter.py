"""What one stream of KV events counts."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.clients.kv_events.events import BlockRemoved, BlockStored, KvEvent, Skipped
from kvproxy.clients.kv_events.status import StreamState, StreamStatus
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock, EndpointId


class StreamMeter:
    """The catalogue's KV event metrics, bound to one endpoint and data-parallel rank."""

    def __init__(self, metrics: Metrics, endpoint: EndpointId, dp_rank: int, *, wall_clock: Clock) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._rank = str(dp_rank)
        self._wall_clock = wall_clock
        self._stored = metrics.kv_events.blocks.labels(endpoint, "stored")
        self._removed = metrics.kv_events.blocks.labels(endpoint, "removed")
        self._behind = metrics.kv_events.behind.labels(endpoint)
        self._lag = metrics.kv_events.lag.labels(endpoint, self._rank)

    def batch(self, outcome: str) -> None:
        """One batch: applied, replayed, duplicate or malformed."""
        self._metrics.kv_events.batches.labels(self._endpoint, outcome).inc()

    def events(self, events: Sequence[KvEvent]) -> None:
        """Events that were applied."""
        self._stored.inc(sum(event.blocks for event in events if isinstance(event, BlockStored)))
        self._removed.inc(sum(event.blocks for event in events if isinstance(event, BlockRemoved)))

    def skipped(self, skipped: Skipped) -> None:
        """Events that could not be used."""
        for reason, count in skipped.counts.items():
            if count:
                self._metrics.kv_events.skipped.labels(self._endpoint, reason).inc(count)

    def gap(self, outcome: str) -> None:
        """A break in the numbering: filled, lost, or a restart of the engine."""
        self._metrics.kv_events.gaps.labels(self._endpoint, outcome).inc()

    def behind(self) -> None:
        """Batches come faster than they are applied."""
        self._behind.inc()

    def lag(self, published_at: float) -> None:
        """Seconds from publishing to having applied; includes the clocks' difference between the hosts."""
        self._lag.set(max(0.0, self._wall_clock() - published_at))

    def state(self, status: StreamStatus) -> None:
        """The stream's state now."""
        for state in StreamState:
            self._metrics.kv_events.state.labels(self._endpoint, self._rank, state.value).set(state is status.state)

    def close(self) -> None:
        """The stream is no more: its gauges go, its counters stay."""
        self._metrics.kv_events.lag.remove(self._endpoint, self._rank)
        for state in StreamState:
            self._metrics.kv_events.state.remove(self._endpoint, self._rank, state.value)
