"""docs/metrics.md says what the catalogue declares."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest

from kvproxy.operate.metrics.catalog import make_metrics
from kvproxy.operate.metrics.reference import describe_metrics, label_texts, render_reference

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_committed_page_is_current() -> None:
    """After a change: `python -m kvproxy.operate.metrics.reference > docs/metrics.md`."""
    assert PAGE.read_text() == render_reference()


def test_every_metric_is_on_the_page_under_the_name_a_scrape_shows() -> None:
    """Nothing in the registry is missing, and nothing on the page is not in the registry."""
    scraped = {
        line.split()[2]
        for line in generate_latest(make_metrics().registry).decode().splitlines()
        if line.startswith("# TYPE")
    }
    assert {metric.name for metrics in describe_metrics().values() for metric in metrics} == scraped


def test_names_and_units_follow_prometheus() -> None:
    """`kvproxy_` before all, seconds and bytes as the last word, `_total` on counters alone."""
    for metric in (metric for metrics in describe_metrics().values() for metric in metrics):
        assert metric.name.startswith("kvproxy_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not metric.name.endswith(("_ms", "_s", "_kb", "_milliseconds")), metric.name


def test_every_metric_and_label_is_explained() -> None:
    """An operator finds a sentence for each, and none for what is gone."""
    metrics = [metric for metrics in describe_metrics().values() for metric in metrics]
    assert all(metric.meaning for metric in metrics)
    assert {label for metric in metrics for label in metric.labels} == set(label_texts())


def test_a_histogram_has_three_series_and_a_counter_one() -> None:
    """Series that dashboards may query."""
    series = {
        name: labels for metrics in describe_metrics().values() for m in metrics for name, labels in m.series.items()
    }
    assert series["kvproxy_ttft_seconds_bucket"] >= {"cluster", "le"}
    assert "le" not in series["kvproxy_ttft_seconds_count"]
    assert "kvproxy_picks_total" in series
    assert "kvproxy_picks" not in series
