"""What cached prompts spared the engines, for those who pay: tokens and seconds of prefill by model and tenant."""

from __future__ import annotations

from kvproxy.cluster.endpoint_metrics import OTHER
from kvproxy.metrics.catalog import Metrics
from kvproxy.metrics.collectors import CounterCell
from kvproxy.request.exchange import Outcome
from kvproxy.routing.speeds import SpeedModel

#: Pairs of model and tenant told apart; further ones are counted together.
MAX_PAIRS = 200


class Savings:
    """Counts for the requests whose engine said that it had some of the prompt cached."""

    def __init__(self, catalog: Metrics) -> None:
        self._catalog = catalog
        self._pairs: dict[tuple[str, str], tuple[CounterCell, CounterCell]] = {}

    def add(self, outcome: Outcome, *, model: str, tenant: str, speeds: SpeedModel | None, now: float) -> None:
        """One request; `speeds` of its cluster, None where nothing learns them."""
        cached = outcome.cached_tokens or 0
        tokens, seconds = self._pairs.get((model, tenant)) or self._pair(model, tenant)
        tokens.value += cached
        if speeds is not None and outcome.endpoint is not None:
            seconds.value += spared_s(cached, speeds) * speeds.slowness(outcome.endpoint, now)

    def _pair(self, model: str, tenant: str) -> tuple[CounterCell, CounterCell]:
        key = (model, tenant) if len(self._pairs) < MAX_PAIRS else (OTHER, OTHER)
        pair = self._pairs.get(key)
        if pair is None:
            catalog = self._catalog
            pair = self._pairs[key] = (
                catalog.cache.saved_tokens.labels(*key),
                catalog.cache.saved_seconds.labels(*key),
            )
        return pair


def spared_s(cached_tokens: int, speeds: SpeedModel) -> float:
    """Pooled seconds the first `cached_tokens` of a prompt would have taken to compute.

    The rest attends to them either way, so of the attention only what is among themselves is spared.
    """
    _, token_s, attention_s, _ = speeds.seconds
    return cached_tokens * (token_s + attention_s * 0.5 * cached_tokens)
