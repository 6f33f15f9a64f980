"""docs/profiles.md, and what `kvproxy check` says of profiles, have the figures of the committed routing report."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.routing_ratios import ratio
from kvproxy.features.profiles import PROFILES, Profile
from tests.docs.blocks import ROOT

_ROW = re.compile(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", re.MULTILINE)
_FIGURE = re.compile(r"\b([a-z_]+) (\d\.\d\d)")


def listed() -> dict[str, dict[str, str]]:
    """By profile and trace: what the router queue makes of the mean time to first token."""
    rows = _ROW.findall((ROOT / "docs" / "profiles.md").read_text())
    return {name: dict(_FIGURE.findall(reason)) for name, reason in rows}


def measured() -> dict[str, str]:
    """The same of every trace and scenario, by the report's runs."""
    runs = json.loads((ROOT / "benchmarks" / "reports" / "routing.json").read_text())["runs"]
    plain = [run for run in runs if not run["variant"]]
    found = {}
    for trace in {run["trace"] for run in plain}:
        own = [run for run in plain if run["trace"] == trace]
        found[trace] = f"{ratio(own, 'kv_aware+queue', 'kv_aware', 'ttft_mean_s').value:.2f}"
    return found


def test_figures_are_those_of_the_report() -> None:
    """A report with other figures changes the page."""
    figures = {trace: figure for each in listed().values() for trace, figure in each.items()}
    assert len(figures) == 11
    assert figures == {trace: figure for trace, figure in measured().items() if trace in figures}


@pytest.mark.parametrize("profile", [each for each, defaults in PROFILES.items() if defaults and each != Profile.BATCH])
def test_a_profile_says_the_same_when_it_is_checked(profile: Profile) -> None:
    lowest, highest = (each(listed()[profile].values()) for each in (min, max))
    span = lowest if lowest == highest else f"{lowest} to {highest}"
    assert f"time to first token {span} of that without" in PROFILES[profile][0].reason
