"""Metrics that show the present: windows, readings, the loop's lag."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvproxy.base.metrics.collectors import CallbackGauge
from kvproxy.base.metrics.present import HitWindow


def test_a_window_forgets_what_slid_out() -> None:
    """The sums are always those of what it holds."""
    window = HitWindow(size=3)
    for prompt, cached in ((100, 0), (100, 50), (200, 0), (300, 300), (10, 5)):
        window.add_request(prompt, cached)
    assert (len(window), window.prompt_tokens, window.cached_tokens, window.hits) == (3, 510, 305, 2)


def test_a_reading_shows_what_there_is_at_the_scrape() -> None:
    """Series come and go with what is read; only the last source is asked."""
    registry = CollectorRegistry()
    reading = CallbackGauge("x_level", "Level", ["tank"], registry=registry)
    assert b"x_level{" not in generate_latest(registry)
    tanks = {"a": 1.0, "b": 2.0}
    reading.set_source(lambda: [(("gone",), 9.0)])
    reading.set_source(lambda: [((name,), value) for name, value in tanks.items()])
    assert registry.get_sample_value("x_level", {"tank": "b"}) == 2.0
    del tanks["b"]
    assert registry.get_sample_value("x_level", {"tank": "b"}) is None
    assert registry.get_sample_value("x_level", {"tank": "gone"}) is None
