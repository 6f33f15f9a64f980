"""Router metrics counted once per request. Children are looked up once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvproxy.base.metrics.collectors import CounterCell
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Tier
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint_metrics import OTHER
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.settings import RouteSettings
from kvproxy.proxy.metrics import CacheUseMetrics, RequestMetrics
from kvproxy.proxy.request.exchange import RESULTS, Exchange, Outcome, result_of
from kvproxy.proxy.request.observer import RequestObserver

#: Pairs of model and tenant counted one by one; further ones are counted together.
MAX_PAIRS = 200


class _ClusterSeries:
    """Kept children of one cluster."""

    def __init__(self, catalog: Metrics, cluster: str) -> None:
        group = catalog.group(RequestMetrics)
        self.results = {result: group.results.labels(cluster, result) for result in RESULTS}
        self.prompt_tokens: CounterCell = group.prompt_tokens.labels(cluster)
        self.media_tokens: CounterCell = group.media_tokens.labels(cluster)
        self.cached_tokens: CounterCell = group.cached_tokens.labels(cluster)
        self.completion_tokens: CounterCell = group.completion_tokens.labels(cluster)
        self.window = catalog.group(CacheUseMetrics).hit_windows.of(cluster)
        self._catalog = catalog
        self._cluster = cluster
        self._tiers: dict[Tier, tuple[CounterCell, CounterCell]] = {}
        self.count_tier(Tier.DEVICE, 0)

    def count_tier(self, tier: Tier, tokens: int) -> None:
        """So many tokens of a prompt were estimated to be on it."""
        cells = self._tiers.get(tier)
        if cells is None:
            cache = self._catalog.group(CacheUseMetrics)
            labels = (self._cluster, tier.value)
            cells = self._tiers[tier] = (cache.tier_hits.labels(*labels), cache.tier_hit_tokens.labels(*labels))
        if tokens:
            cells[0].value += 1.0
            cells[1].value += tokens


class RouteMetrics(RequestObserver):
    """Observes finished requests; what belongs to an endpoint is counted there, and goes with it."""

    def __init__(
        self,
        catalog: Metrics,
        *,
        clusters: Mapping[str, Cluster],
        routes: Sequence[RouteSettings] = (),
        served: Callable[[str], bool] = lambda model: False,
    ) -> None:
        self.catalog = catalog
        self._of = clusters
        self._aliases = frozenset(route.model for route in routes if route.model and not route.model.endswith("*"))
        self._served = served  # from the engines' own lists, which are bounded
        self._clusters: dict[str, _ClusterSeries] = {}
        self._ends: dict[str, CounterCell] = {}
        self._savings = Savings(catalog)

    def finished(self, exchange: Exchange, now: float) -> None:
        """Count one request out."""
        outcome = exchange.outcome
        if (end := self._ends.get(outcome.end)) is not None:
            end.value += 1.0
        else:
            self.observe_end(exchange)
        series = self._clusters.get(outcome.cluster)
        if series is None:
            series = self._clusters[outcome.cluster] = _ClusterSeries(self.catalog, outcome.cluster)
        series.results[result_of(outcome.end, outcome.status)].value += 1.0
        if outcome.cluster:
            cluster = self._of.get(outcome.cluster)
            model = self._model(exchange, cluster)
            self._time(exchange, cluster, model, now)
            self._count_tokens(exchange, series, cluster, model, now)

    def observe_end(self, exchange: Exchange) -> None:
        """Count its end alone, if it has one: it was not for an engine."""
        outcome = exchange.outcome
        if not outcome.end:
            return
        end = self._ends.get(outcome.end)
        if end is None:
            end = self._ends[outcome.end] = self.catalog.group(RequestMetrics).ends.labels(outcome.end)
        end.value += 1.0

    def _model(self, exchange: Exchange, cluster: Cluster | None) -> str:
        """Return a label from a closed set: clients may write any name into a body."""
        inference = exchange.inference
        model = "" if inference is None else inference.model
        known = not model or model in self._aliases or (cluster is not None and model in cluster.screening.declared)
        return model if known or self._served(model) else OTHER

    def _time(self, exchange: Exchange, cluster: Cluster | None, model: str, now: float) -> None:
        """How long it took, where it went; a request that went nowhere took no time on an endpoint."""
        outcome = exchange.outcome
        endpoint = None if cluster is None or outcome.endpoint is None else cluster.find_endpoint(outcome.endpoint)
        latency = None if endpoint is None else endpoint.metrics.find_latency(model)
        if latency is None:
            return
        duration_s = now - exchange.received_at
        latency.duration.observe(duration_s)
        if outcome.ttft_s is None:
            return
        tokens = outcome.completion_tokens
        inference = exchange.inference
        if inference is None or not inference.stream:
            latency.whole.observe(outcome.ttft_s)
            return
        latency.ttft.observe(outcome.ttft_s)
        if tokens is not None and tokens > 1:
            latency.itl.observe((duration_s - outcome.ttft_s) / (tokens - 1))

    def _count_tokens(
        self, exchange: Exchange, series: _ClusterSeries, cluster: Cluster | None, model: str, now: float
    ) -> None:
        outcome = exchange.outcome
        facts = exchange.facts
        endpoint = outcome.endpoint
        if outcome.ttft_s is not None and facts is not None and endpoint is not None:
            held = facts.by_endpoint.get(endpoint)
            if held is not None:
                series.count_tier(Tier.DEVICE, held.device_tokens)
                for tier, tokens in held.lower:
                    series.count_tier(tier, tokens)
        prompt = outcome.prompt_tokens
        cached = outcome.cached_tokens
        if outcome.completion_tokens:
            series.completion_tokens.value += outcome.completion_tokens
        if not prompt:
            return
        series.prompt_tokens.value += prompt
        if outcome.media_tokens:
            series.media_tokens.value += outcome.media_tokens
        if cached is None:
            return
        series.window.add_request(prompt, cached)
        if cached:
            series.cached_tokens.value += cached
            known = facts is not None and facts.searched and facts.prompt_tokens > 0
            speeds = cluster.policies.speeds if known and cluster is not None else None
            self._savings.add_request(outcome, model=model, tenant=exchange.tenant, speeds=speeds, now=now)


class Savings:
    """Prefill saved by cached prompts: tokens and seconds by model and tenant.

    Counted for the requests whose engine reported that it had some of the prompt cached; seconds only where the prompt
    was known before the pick, since the speeds that price them are learned from such requests alone."""

    def __init__(self, catalog: Metrics) -> None:
        self._catalog = catalog
        self._pairs: dict[tuple[str, str], tuple[CounterCell, CounterCell]] = {}

    def add_request(self, outcome: Outcome, *, model: str, tenant: str, speeds: SpeedModel | None, now: float) -> None:
        """One request; `speeds` of its cluster, None where it has learned nothing from such a request."""
        cached = outcome.cached_tokens or 0
        tokens, seconds = self._pairs.get((model, tenant)) or self._pair(model, tenant)
        tokens.value += cached
        if speeds is not None and outcome.endpoint is not None:
            seconds.value += spared_s(cached, speeds) * speeds.slowness(outcome.endpoint, now)

    def _pair(self, model: str, tenant: str) -> tuple[CounterCell, CounterCell]:
        key = (model, tenant) if len(self._pairs) < MAX_PAIRS else (OTHER, OTHER)
        pair = self._pairs.get(key)
        if pair is None:
            group = self._catalog.group(CacheUseMetrics)
            pair = self._pairs[key] = (group.saved_tokens.labels(*key), group.saved_seconds.labels(*key))
        return pair


def spared_s(cached_tokens: int, speeds: SpeedModel) -> float:
    """Pooled seconds the first `cached_tokens` of a prompt would have taken to compute.

    The rest attends to them either way, so of the attention only what is among themselves is spared.
    """
    _, token_s, attention_s, _ = speeds.seconds
    return cached_tokens * (token_s + attention_s * 0.5 * cached_tokens)
