"""What the router counts once per request. Children are looked up once and kept."""

from __future__ import annotations

from kvproxy.filters.exchange import Exchange
from kvproxy.metrics.catalog import Metrics
from kvproxy.metrics.counting import Distribution, Tally


class _ClusterSeries:
    """Kept children of one cluster."""

    def __init__(self, catalog: Metrics, cluster: str) -> None:
        self.ttft: Distribution = catalog.ttft.labels(cluster)
        self.duration: Distribution = catalog.duration.labels(cluster)
        self.prompt_tokens: Tally = catalog.prompt_tokens.labels(cluster)
        self.cached_tokens: Tally = catalog.cached_tokens.labels(cluster)
        self.completion_tokens: Tally = catalog.completion_tokens.labels(cluster)


class RouteMetrics:
    """Observes finished requests by cluster; what belongs to an endpoint is counted there, and goes with it."""

    def __init__(self, catalog: Metrics) -> None:
        self.catalog = catalog
        self._clusters: dict[str, _ClusterSeries] = {}
        self._ends: dict[str, Tally] = {}

    def observe(self, exchange: Exchange, now: float) -> None:
        """Count one request out."""
        outcome = exchange.outcome
        end = self._ends.get(outcome.end)
        if end is None:
            end = self._ends[outcome.end] = self.catalog.request_ends.labels(outcome.end)
        end.inc()
        if outcome.cluster:
            self._observe_cluster(exchange, now)

    def _observe_cluster(self, exchange: Exchange, now: float) -> None:
        outcome = exchange.outcome
        series = self._clusters.get(outcome.cluster)
        if series is None:
            series = self._clusters[outcome.cluster] = _ClusterSeries(self.catalog, outcome.cluster)
        series.duration.observe(now - exchange.received_at)
        if outcome.ttft_s is not None:
            series.ttft.observe(outcome.ttft_s)
        if outcome.prompt_tokens:
            series.prompt_tokens.inc(outcome.prompt_tokens)
        if outcome.cached_tokens:
            series.cached_tokens.inc(outcome.cached_tokens)
        if outcome.completion_tokens:
            series.completion_tokens.inc(outcome.completion_tokens)
