"""The list of features, and what becomes of one that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.base.installed import BaseFeature, all_features, installed, load_features
from kvproxy.base.settings import feature_settings
from kvproxy.base.settings.feature_settings import FeatureSettings, list_packages, load_settings
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features import SHIPPED
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import ProxyFeature


class One(BaseFeature):
    """A feature of the lowest room only."""

    name = "one"


def broken() -> object:
    raise ImportError("no module named 'missing'")


def test_a_broken_feature_is_named_and_the_rest_works() -> None:
    """Whatever its import raises, what it is, and a name that is taken."""
    one = One()
    found = load_features([("broken", broken), ("one", lambda: one), ("number", lambda: 7), ("one", One)])
    assert found.loaded == (one,)
    assert found.failed == {
        "broken": "cannot be loaded: ImportError: no module named 'missing'",
        "number": "7 is no feature",
        "one": "another feature has its name",
    }


def test_everything_on_the_list_loads() -> None:
    """Each by the name of its folder."""
    assert all_features().failed == {}
    assert {feature.name for feature in all_features().loaded} >= set(SHIPPED)
    assert all(isinstance(feature, Feature) for feature in all_features().loaded)


def test_every_feature_finds_its_settings() -> None:
    """Those of the module beside it; without one it adds nothing."""
    found = {feature.name: feature.settings for feature in all_features().loaded}
    assert set(found["leases"].fields) == {KvCacheSettings}
    assert found["hygiene"] == FeatureSettings()
    assert [found[name] for name in list_packages()] == list(map(load_settings, list_packages().values()))


def test_broken_settings_are_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of all other features are read."""
    packages = {"broken": "kvproxy.features.no_such_feature", "leases": "kvproxy.features.leases"}
    monkeypatch.setattr(feature_settings, "list_packages", lambda: packages)
    (leases,) = feature_settings.settings_of_features.__wrapped__()
    assert set(leases.fields) == {KvCacheSettings}
    assert "settings of feature broken are left out" in caplog.text


def test_a_room_gets_the_features_with_its_members() -> None:
    """A feature that derives from another room's class has no filters to offer."""
    assert {feature.name for feature in installed(ProxyFeature)} >= {"tracing", "normalize"}


def test_every_feature_has_its_page_with_what_it_costs() -> None:
    """A README in each folder that is on the list: what it does, costs, gains, and how stable it is."""
    folder = Path(__file__).parents[2] / "kvproxy" / "features"
    wanted = ("## What it does", "cost", "gain", "stability: ")
    missing = [
        f"{name}: {heading}"
        for name in SHIPPED
        for heading in wanted
        if heading.lower() not in (folder / name / "README.md").read_text().lower()
    ]
    assert not missing


def test_nothing_imports_a_feature() -> None:
    """Each is a folder that is on the list, and no arrow leads to one; `make test-removal` tries it."""
    package = Path(__file__).parents[2] / "kvproxy" / "features"
    there = {path.stem for path in package.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert set(SHIPPED) == there - {"__init__"}
    arrows = (Path(__file__).parents[1] / "arrows_up.txt").read_text()
    assert "-> kvproxy.features" not in arrows
