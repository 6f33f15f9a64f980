"""Workload profiles: what they set, what they leave, and that both is said."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.features.profiles import PROFILES
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.config.schema import Config, Profile
from tests.docs.blocks import ROOT

ENDPOINTS = {"endpoints": ["http://127.0.0.1:8000"]}


def notes(raw: dict[str, Any]) -> list[str]:
    """What the check says of a good configuration."""
    config, problems = check_config(raw)
    assert config is not None
    return [problem.message for problem in problems]


@pytest.mark.parametrize("profile", [each for each in Profile if not PROFILES[each]])
def test_a_profile_that_changes_nothing_says_that(profile: Profile) -> None:
    """The configuration is the one without it."""
    raw = {"profile": profile.value, **ENDPOINTS}
    assert load_config(raw).model_copy(update={"profile": None}) == load_config(ENDPOINTS)
    assert notes(raw) == [f"{profile} changes nothing: the general defaults are the best known for it"]


def test_a_batch_may_wait_for_its_first_byte() -> None:
    """An hour, beside what is written there."""
    config = load_config({"profile": "batch", "timeouts": {"idle": "5s"}, **ENDPOINTS})
    assert (config.timeouts.first_byte, config.timeouts.idle) == (3600.0, 5.0)


def test_what_is_written_wins() -> None:
    """And is said to."""
    written = {"timeouts": {"first_byte": "9s"}, **ENDPOINTS}
    raw = {"profile": "batch", **written}
    assert load_config(raw).model_copy(update={"profile": None}) == load_config(written)
    assert "as it is written" in notes(raw)[0]


def test_an_unknown_profile_names_the_nearest() -> None:
    """As every other word."""
    config, problems = check_config({"profile": "batsh", **ENDPOINTS})
    assert config is None
    assert [problem.hint for problem in problems] == ["did you mean 'batch'?"]
    for wrong in ([], 3, {"chat": 1}):
        assert check_config({"profile": wrong, **ENDPOINTS})[0] is None


def test_the_page_tells_each_profile_and_what_it_sets() -> None:
    """A row each, with the section and the key."""
    rows = [line for line in (ROOT / "docs" / "profiles.md").read_text().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(Profile)
    for row, profile in zip(rows, Profile, strict=True):
        for default in PROFILES[profile]:
            assert f"`{default.section}: {{{default.key}: " in row
        assert ("| nothing |" in row) is not bool(PROFILES[profile])


def test_the_default_is_no_profile() -> None:
    """So that nothing changes for files without one."""
    assert Config().profile is None
