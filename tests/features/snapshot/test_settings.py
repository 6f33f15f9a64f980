"""Settings of the snapshot: doubts about them, and the worker that keeps the file."""

from __future__ import annotations

import pytest

from kvproxy.features.snapshot.feature import FEATURE
from kvproxy.features.snapshot.settings import SETTINGS
from kvproxy.operate.capabilities import list_capabilities
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.config.schema import Config

CONFIG = {"endpoints": {"a": "http://127.0.0.1:1"}}


def keeping(**snapshot: str) -> Config:
    return load_config({**CONFIG, "filters": ["inference_request", {"kvcache": {"snapshot": snapshot}}, "router"]})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"path": "/nowhere/kept"}, "filters[1].kvcache.snapshot.path: no such folder: '/nowhere'"),
    ],
)
def test_doubtful_settings(settings: dict[str, str], problem: str) -> None:
    """A folder that is not there; it does not count without the filter."""
    for enabled in (True, False):
        kvcache = {"snapshot": settings, "enabled": enabled}
        raw = {**CONFIG, "filters": ["inference_request", {"kvcache": kvcache}, "router"]}
        _, found = check_config(raw)
        assert any(problem in one.located() for one in found) == enabled


def test_the_first_worker_keeps_the_file() -> None:
    """A file that all replace would hold the last one's."""
    config = keeping(path="/tmp/s")
    assert SETTINGS.share(config, 0, lambda whole: whole) == {}
    filters = SETTINGS.share(config, 1, lambda whole: whole)["filters"]
    assert isinstance(filters, tuple)
    assert [filters[1].settings.snapshot.path, filters[2]] == ["", config.filters[2]]


def test_facts_are_gathered_for_it() -> None:
    """Also under a policy that weighs none: the next life may have another."""
    settings = [spec.settings for spec in keeping(path="/tmp/s").filters if spec.name == "kvcache"]
    assert [FEATURE.needs(one).facts for one in settings] == [True]


def test_whether_it_is_on_is_shown() -> None:
    """By its path."""
    for config, shown in (
        (keeping(path="/tmp/s"), ("on", "`snapshot.path`")),
        (keeping(), ("off", "no `snapshot.path`")),
    ):
        [row] = [one for one in list_capabilities(config) if one.name == "snapshot"]
        assert (row.state, row.reason) == shown
