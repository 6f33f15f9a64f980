"""Filters of other distributions by name, and every mistake named."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.operate.filter_plugins import GROUP, discover
from kvproxy.proxy.filters.chain import FilterType
from kvproxy.proxy.filters.registry import FILTERS

PLAIN = FilterType(None, lambda app, settings, context: app)


class FakeDistribution:
    """Where an entry point came from."""

    name = "their-package"


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)._for(FakeDistribution())  # type: ignore[attr-defined,no-any-return]


HERE = "tests.operate.test_filter_plugins"


def test_filters_of_other_distributions() -> None:
    """An entry point of the group is a filter by its name."""
    assert discover(installed=lambda: [entry("theirs", f"{HERE}:PLAIN")]) == {"theirs": PLAIN}


def test_only_wanted_filters_are_loaded() -> None:
    """A broken filter that is not used stops no proxy."""
    installed = [entry("theirs", f"{HERE}:PLAIN"), entry("broken", "no.such.module:x")]
    assert discover({"theirs"}, installed=lambda: installed) == {"theirs": PLAIN}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([entry("broken", "no.such.module:x")], "'broken' of their-package: cannot be loaded: ModuleNotFoundError"),
        ([entry("odd", f"{HERE}:HERE")], f"'odd' of their-package: {HERE}:HERE is not a FilterType"),
        ([entry("router", f"{HERE}:PLAIN")], "'router' of their-package: its name is taken already"),
        ([entry("x", f"{HERE}:PLAIN"), entry("x", f"{HERE}:PLAIN")], "'x' of their-package: its name is taken already"),
        ([EntryPoint("odd", f"{HERE}:HERE", GROUP)], f"'odd' of {HERE}:HERE: {HERE}:HERE is not a FilterType"),
    ],
)
def test_a_bad_plugin_is_named(found: list[EntryPoint], message: str) -> None:
    """Its distribution and what is wrong with it; never a crash of ours."""
    with pytest.raises(ConfigError) as caught:
        discover(installed=lambda: found)
    assert message in str(caught.value)


def test_installed_packages_can_be_listed() -> None:
    """The group is read from the environment by default."""
    assert set(discover()).isdisjoint(FILTERS)
