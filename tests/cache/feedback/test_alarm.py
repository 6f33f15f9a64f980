"""When predictions that do not come true are said, and how often."""

from __future__ import annotations

import logging

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.feedback.prediction_stats import LASTS_S, SAY_AGAIN_S, PredictionAlarm, PredictionStats
from kvproxy.cache.metrics import KvCacheMetrics
from kvproxy.cluster.routing.policy import APPROXIMATE, PRECISE, SESSION, FactSource
from tests.cache.support import A, B
from tests.support.clock import FakeClock


@pytest.fixture
def watchdog() -> PredictionAlarm:
    return PredictionAlarm("default", A, APPROXIMATE)


def told(watchdog: PredictionAlarm, *reused: int, now: float = 0.0) -> None:
    """Responses to predictions of 4096 tokens."""
    for number, tokens in enumerate(reused):
        watchdog.observe_reuse(4096, tokens, f"r{number}", now)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_line_has_the_numbers_the_request_and_what_to_do(
    watchdog: PredictionAlarm, caplog: pytest.LogCaptureFixture
) -> None:
    told(watchdog, 0, 0, 0)
    (line,) = lines(caplog)
    assert line.startswith(
        "[kvcache] default/a: predicted 4096 tokens by routed requests, engine reused 0 (request r2); "
        "3 of the last 8 such predictions were wrong; likely prefix caching is off,"
    )


def test_two_wrong_ones_are_no_alarm(watchdog: PredictionAlarm, caplog: pytest.LogCaptureFixture) -> None:
    """Engines evict, now and then what was expected to be there."""
    told(watchdog, 0, 4096, 4096, 0, *[4096] * 8, 0, 0)
    assert watchdog.raised(0.0) is None
    assert not lines(caplog)


def test_a_quarter_reused_is_not_wrong(watchdog: PredictionAlarm) -> None:
    """Contradicted, yes; nothing that is broken looks like that."""
    told(watchdog, *[1024] * 8)
    assert watchdog.raised(0.0) is None


def test_it_is_said_again_after_a_while_with_what_came_in_between(
    watchdog: PredictionAlarm, caplog: pytest.LogCaptureFixture
) -> None:
    told(watchdog, *[0] * 20)
    assert len(lines(caplog)) == 1
    told(watchdog, 0, now=SAY_AGAIN_S)
    assert len(lines(caplog)) == 2
    assert "8 of the last 8 such predictions were wrong, 17 more since the last message; likely" in lines(caplog)[1]


def test_it_ends_when_predictions_come_true_again(watchdog: PredictionAlarm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    told(watchdog, 0, 0, 0, *[4096] * 6)
    assert watchdog.raised(0.0) is not None
    told(watchdog, 4096)
    assert watchdog.raised(0.0) is None
    assert "predictions by routed requests come true again" in caplog.text


def test_it_ends_without_traffic_as_well(watchdog: PredictionAlarm) -> None:
    """No request goes there any more: there is nothing to act on."""
    told(watchdog, 0, 0, 0)
    assert watchdog.raised(LASTS_S) is not None
    assert watchdog.raised(LASTS_S + 1.0) is None
    told(watchdog, 0, now=LASTS_S + 2.0)
    assert watchdog.raised(LASTS_S + 2.0) is None


def test_a_request_without_an_id_is_told_without(watchdog: PredictionAlarm) -> None:
    for _ in range(3):
        watchdog.observe_reuse(600, 0, "", 0.0)
    alarm = watchdog.raised(0.0)
    assert alarm is not None
    assert "(request" not in alarm.what
    assert (alarm.severity, alarm.where) == ("warning", "default/a")


@pytest.mark.parametrize("source", [APPROXIMATE, PRECISE, SESSION])
def test_every_source_has_its_own_causes(source: FactSource) -> None:
    under_test = PredictionAlarm("default", A, source)
    told(under_test, 0, 0, 0)
    alarm = under_test.raised(0.0)
    assert alarm is not None
    assert alarm.fix.startswith("likely ")
    assert ("routed" in alarm.what) is (source is APPROXIMATE)


def count(scores: PredictionStats, *, endpoint: str = "a", predicted: int = 4096, cached: int = 0) -> None:
    scores.count_prediction(
        "default",
        A if endpoint == "a" else B,
        PRECISE,
        predicted=predicted,
        cached=cached,
        contradicted=cached < predicted,
        request_id="r",
    )


def test_the_score_is_by_endpoint_and_source() -> None:
    metrics = Metrics()
    scores = PredictionStats(metrics, clock=FakeClock())
    for _ in range(3):
        count(scores)
    count(scores, endpoint="b", cached=3000)
    count(scores, endpoint="b", cached=5000)
    found = {
        (name, labels["endpoint"], labels.get("result")): value
        for metric in (
            metrics.group(KvCacheMetrics).predictions,
            metrics.group(KvCacheMetrics).predicted_tokens,
            metrics.group(KvCacheMetrics).reused_tokens,
        )
        for family in metric.collect()
        for name, labels, value, *_ in family.samples
        if value
    }
    assert found == {
        ("kvproxy_kvcache_predictions_total", "a", "miss"): 3,
        ("kvproxy_kvcache_predictions_total", "b", "partial"): 1,
        ("kvproxy_kvcache_predictions_total", "b", "hit"): 1,
        ("kvproxy_kvcache_predicted_tokens_total", "a", None): 3 * 4096,
        ("kvproxy_kvcache_predicted_tokens_total", "b", None): 2 * 4096,
        ("kvproxy_kvcache_reused_tokens_total", "b", None): 3000 + 4096,
    }
    assert [alarm.endpoint for alarm in scores.raised_alarms()] == [A]
    assert list(scores.alarm_series()) == [(("default", "a", "precise"), 1.0), (("default", "b", "precise"), 0.0)]


def test_small_predictions_raise_no_alarm() -> None:
    """A template's few tokens, wrong for a hundred reasons."""
    scores = PredictionStats(Metrics(), clock=FakeClock())
    for _ in range(20):
        count(scores, predicted=200)
    assert not scores.raised_alarms()


def test_an_endpoint_that_left_takes_its_series_along() -> None:
    metrics = Metrics()
    scores = PredictionStats(metrics, clock=FakeClock())
    for endpoint in "ab":
        count(scores, endpoint=endpoint)
    scores.keep_only({("default", B)})
    shown = {
        labels["endpoint"]
        for family in metrics.group(KvCacheMetrics).predictions.collect()
        for _, labels, *_ in family.samples
    }
    assert shown == {"b"}
    assert [labels[1] for labels, _ in scores.alarm_series()] == ["b"]
