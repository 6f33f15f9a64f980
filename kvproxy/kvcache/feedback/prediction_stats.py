"""The score of every source about every endpoint: what was predicted, and what the engine then reused."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvproxy.kvcache.feedback.alarm import LARGE_TOKENS, Alarm, PredictionAlarm
from kvproxy.metrics.catalog import Metrics
from kvproxy.routing.policy import FactSource
from kvproxy.types import Clock, EndpointId

_RESULTS = ("miss", "partial", "hit")


class PredictionStats:
    """Bounded by the endpoints there are: `keep` forgets the others, and their series."""

    def __init__(self, metrics: Metrics, *, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._scores: dict[tuple[str, EndpointId, FactSource], _Score] = {}

    def count(
        self,
        cluster: str,
        endpoint: EndpointId,
        source: FactSource,
        *,
        predicted: int,
        cached: int,
        contradicted: bool,
        request_id: str,
    ) -> None:
        """A response reported `cached` tokens where `predicted` had been expected, more than `contradicted` allows."""
        key = (cluster, endpoint, source)
        score = self._scores.get(key)
        if score is None:
            score = self._scores[key] = _Score(self._metrics, cluster, endpoint, source)
        result = score.miss if cached == 0 else score.partial if contradicted else score.hit
        result.value += 1.0
        score.predicted.value += predicted
        score.reused.value += min(predicted, cached)
        if predicted >= LARGE_TOKENS:
            score.watchdog.observe(predicted, cached, request_id, self._clock())

    def alarms(self) -> list[Alarm]:
        """Those that are raised now."""
        now = self._clock()
        raised = (score.watchdog.raised(now) for score in self._scores.values())
        return [alarm for alarm in raised if alarm is not None]

    def alarm_series(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """1 or 0 for each source and endpoint there was a prediction of."""
        now = self._clock()
        for (cluster, endpoint, source), score in list(self._scores.items()):
            yield (cluster, str(endpoint), source.value), float(score.watchdog.raised(now) is not None)

    def keep(self, present: Collection[tuple[str, EndpointId]]) -> None:
        """Forget all endpoints but these."""
        for key in [key for key in self._scores if key[:2] not in present]:
            del self._scores[key]
            labels = (*key[:2], key[2].value)
            self._metrics.kvcache.predicted_tokens.remove(*labels)
            self._metrics.kvcache.reused_tokens.remove(*labels)
            for result in _RESULTS:
                self._metrics.kvcache.predictions.remove(*labels, result)


class _Score:
    """Kept children of one source and endpoint."""

    def __init__(self, metrics: Metrics, cluster: str, endpoint: EndpointId, source: FactSource) -> None:
        labels = (cluster, endpoint, source.value)
        self.miss, self.partial, self.hit = (metrics.kvcache.predictions.labels(*labels, result) for result in _RESULTS)
        self.predicted = metrics.kvcache.predicted_tokens.labels(*labels)
        self.reused = metrics.kvcache.reused_tokens.labels(*labels)
        self.watchdog = PredictionAlarm(cluster, endpoint, source)
