"""The score of every source about every endpoint: what was predicted, what the engine then reused, and the alarm when
predictions do not come true."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cluster.feature import ClusterFeature, SourceTexts
from kvproxy.cluster.routing.policy import APPROXIMATE, PRECISE, SESSION, FactSource

log = logging.getLogger("kvproxy.kvcache")

_RESULTS = ("miss", "partial", "hit")


class PredictionStats:
    """Bounded by the endpoints there are: `keep_only` forgets the others, and their series."""

    def __init__(self, metrics: Metrics, *, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._scores: dict[tuple[str, EndpointId, FactSource], _Score] = {}

    def count_prediction(
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
        """Count a response with `cached` tokens where `predicted` had been expected, more than `contradicted`
        allows."""
        key = (cluster, endpoint, source)
        score = self._scores.get(key)
        if score is None:
            score = self._scores[key] = _Score(self._metrics, cluster, endpoint, source)
        result = score.miss if cached == 0 else score.partial if contradicted else score.hit
        result.value += 1.0
        score.predicted.value += predicted
        score.reused.value += min(predicted, cached)
        if predicted >= LARGE_TOKENS:
            score.alarm.observe_reuse(predicted, cached, request_id, self._clock())

    def raised_alarms(self) -> list[Alarm]:
        now = self._clock()
        raised = (score.alarm.raised(now) for score in self._scores.values())
        return [alarm for alarm in raised if alarm is not None]

    def alarm_series(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """1 or 0 for each source and endpoint there was a prediction of."""
        now = self._clock()
        for (cluster, endpoint, source), score in list(self._scores.items()):
            yield (cluster, str(endpoint), source), float(score.alarm.raised(now) is not None)

    def keep_only(self, present: Collection[tuple[str, EndpointId]]) -> None:
        """Forget all endpoints but these."""
        metrics = self._metrics.group(KvCacheMetrics)
        for key in [key for key in self._scores if key[:2] not in present]:
            del self._scores[key]
            labels = (*key[:2], key[2])
            metrics.predicted_tokens.remove(*labels)
            metrics.reused_tokens.remove(*labels)
            for result in _RESULTS:
                metrics.predictions.remove(*labels, result)


class _Score:
    """Kept children of one source and endpoint."""

    def __init__(self, metrics: Metrics, cluster: str, endpoint: EndpointId, source: FactSource) -> None:
        labels = (cluster, endpoint, source)
        self.miss, self.partial, self.hit = (
            metrics.group(KvCacheMetrics).predictions.labels(*labels, result) for result in _RESULTS
        )
        self.predicted = metrics.group(KvCacheMetrics).predicted_tokens.labels(*labels)
        self.reused = metrics.group(KvCacheMetrics).reused_tokens.labels(*labels)
        self.alarm = PredictionAlarm(cluster, endpoint, source)


#: Shorter predictions cost little when they are wrong.
LARGE_TOKENS = 512
#: Wrong is: less than this share of the prediction was reused.
_WRONG_SHARE = 0.25
#: Wrong ones among the latest large predictions that raise the alarm, and that are few enough to end it.
WINDOW = 8
_RAISED_AT = 3
_ENDED_AT = 1
#: A line of the log at most this often, and how long an alarm lasts without another wrong prediction.
SAY_AGAIN_S = 60.0
LASTS_S = 900.0

_TEXTS = {
    APPROXIMATE: SourceTexts(
        "routed requests",
        "likely prefix caching is off, the engine restarted or cleared its cache, other clients fill it, or its chat "
        "template begins with something that changes (a date): see `kvproxy doctor`, and the engine's own hit ratio in "
        "kvproxy_endpoint_cache_hit_ratio",
    ),
    PRECISE: SourceTexts(
        "its KV events",
        "likely events were lost or come from another engine or data-parallel rank: see kvproxy_kv_event_stream_state "
        "and kvproxy_kv_event_lag_seconds, and the event endpoints in the configuration",
    ),
    SESSION: SourceTexts(
        "where its session was served last",
        "likely the engine's cache is too small for its sessions, or it restarted: see "
        "kvproxy_endpoint_cache_hit_ratio",
    ),
}


def _find_texts(source: FactSource) -> SourceTexts:
    found = (feature.fact_sources.get(source) for feature in installed(ClusterFeature))
    return _TEXTS.get(source) or next(filter(None, found), SourceTexts(source, "see `kvproxy doctor`"))


@dataclass(frozen=True, slots=True)
class Alarm:
    """Alarm of an operator: the latest wrong prediction, and the number of wrong ones among the latest."""

    cluster: str
    endpoint: EndpointId
    source: SourceTexts
    predicted_tokens: int
    reused_tokens: int
    request_id: str
    wrong: int

    @property
    def severity(self) -> str:
        return "warning"

    @property
    def where(self) -> str:
        """The endpoint."""
        return f"{self.cluster}/{self.endpoint}"

    @property
    def what(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return (
            f"predicted {self.predicted_tokens} tokens by {self.source.by}, engine reused {self.reused_tokens}"
            f"{request}; {self.wrong} of the last {WINDOW} such predictions were wrong"
        )

    @property
    def fix(self) -> str:
        return self.source.fix


class PredictionAlarm:
    """Watches the predictions of one source about one endpoint."""

    __slots__ = ("_alarm", "_cluster", "_endpoint", "_said_at", "_source", "_unsaid", "_wrong", "_wrong_at")

    def __init__(self, cluster: str, endpoint: EndpointId, source: FactSource) -> None:
        self._cluster = cluster
        self._endpoint = endpoint
        self._source = _find_texts(source)
        self._wrong = 0  # a bit for each of the latest large predictions
        self._alarm: Alarm | None = None
        self._wrong_at = 0.0
        self._said_at: float | None = None
        self._unsaid = 0

    def observe_reuse(self, predicted_tokens: int, reused_tokens: int, request_id: str, now: float) -> None:
        """Observe a response to a prediction of at least LARGE_TOKENS."""
        wrong = reused_tokens < predicted_tokens * _WRONG_SHARE
        if not wrong and not self._wrong:
            return
        self._wrong = (self._wrong << 1 | wrong) & ((1 << WINDOW) - 1)
        count = self._wrong.bit_count()
        if wrong and (self._alarm is not None or count >= _RAISED_AT):
            self._alarm = Alarm(
                self._cluster, self._endpoint, self._source, predicted_tokens, reused_tokens, request_id, count
            )
            self._wrong_at = now
            self._say(self._alarm, now)
        elif self._alarm is not None and count <= _ENDED_AT:
            log.info("[kvcache] %s: predictions by %s come true again", self._alarm.where, self._source.by)
            self._alarm = None

    def raised(self, now: float) -> Alarm | None:
        if self._alarm is not None and now - self._wrong_at > LASTS_S:
            self._alarm = None
            self._wrong = 0
        return self._alarm

    def _say(self, alarm: Alarm, now: float) -> None:
        if self._said_at is not None and now - self._said_at < SAY_AGAIN_S:
            self._unsaid += 1
            return
        more = f", {self._unsaid} more since the last message" if self._unsaid else ""
        log.warning("[kvcache] %s: %s%s; %s", alarm.where, alarm.what, more, alarm.fix)
        self._said_at = now
        self._unsaid = 0
