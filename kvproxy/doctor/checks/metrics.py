"""Does the engine show figures that routing can use?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.clients.engine_metrics import EngineMetrics, parse_engine_metrics
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, warning
from kvproxy.errors import ClientError


@dataclass(frozen=True, slots=True)
class MetricsCheck:
    """One scrape of `/metrics`."""

    engine: Engine

    name = "metrics"
    calls = 3

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        await self.engine.models()  # what is no engine is told elsewhere
        lost = "its load and cache size are guessed"
        try:
            metrics = parse_engine_metrics(await self.engine.exposition())
        except ClientError as error:
            fix = "serve /metrics to the proxy (vLLM: do not start it with `--disable-log-stats`)"
            return [warning(self.where, f"shows no metrics ({error}): {lost}", fix)]
        if metrics == EngineMetrics(started_at=metrics.started_at):  # which any Python service shows
            what = f"its /metrics hold none of vLLM's or SGLang's figures: {lost}"
            return [warning(self.where, what, "is it one of them?")]
        capacity = metrics.cache.capacity_tokens if metrics.cache is not None else None
        return [ok(self.where, f"KV cache of {capacity} tokens" if capacity else "shows its load")]
