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


@pytest.mark.parametrize("profile", [Profile.RAG, Profile.CODE, Profile.AGENT])
def test_a_profile_turns_the_queue_on_and_says_so(profile: Profile) -> None:
    """With the reason; nothing else changes."""
    raw = {"profile": profile.value, **ENDPOINTS}
    assert load_config(raw) == load_config({**raw, "queue": {}})
    assert notes(raw) == [f"{profile} sets clusters.default.queue.enabled to true"]
    assert check_config(raw)[1][0].hint


@pytest.mark.parametrize("profile", [Profile.CHAT, Profile.SUMMARIZATION])
def test_a_profile_that_changes_nothing_says_that(profile: Profile) -> None:
    """The configuration is the one without it."""
    raw = {"profile": profile.value, **ENDPOINTS}
    assert load_config(raw).model_copy(update={"profile": None}) == load_config(ENDPOINTS)
    assert notes(raw) == [f"{profile} changes nothing: the general defaults are the best known for it"]


def test_a_batch_may_wait_for_its_first_byte() -> None:
    """An hour, beside what is written there."""
    config = load_config({"profile": "batch", "timeouts": {"idle": "5s"}, **ENDPOINTS})
    assert (config.timeouts.first_byte, config.timeouts.idle) == (3600.0, 5.0)


@pytest.mark.parametrize(
    ("profile", "written"),
    [
        ("rag", {"queue": {"enabled": False}}),
        ("rag", {"queue": {"limit": 7}}),
        ("batch", {"timeouts": {"first_byte": "9s"}}),
    ],
)
def test_what_is_written_wins(profile: str, written: dict[str, Any]) -> None:
    """And is said to."""
    raw = {"profile": profile, **written, **ENDPOINTS}
    with_profile, without = load_config(raw), load_config({**written, **ENDPOINTS})
    assert with_profile.model_copy(update={"profile": None}) == without
    assert "as it is written" in notes(raw)[0]


def test_only_clusters_whose_policy_can_have_a_queue_get_one() -> None:
    """Each of several; the file's own data is left as it is."""
    raw = {
        "profile": "rag",
        "clusters": {"one": dict(ENDPOINTS), "two": {"policy": "round_robin", **ENDPOINTS}},
        "routes": [{"model": "a", "cluster": "one"}, {"model": "*", "cluster": "two"}],
    }
    config = load_config(raw)
    assert {name: cluster.queue.enabled for name, cluster in config.clusters.items()} == {"one": True, "two": False}
    assert raw["clusters"]["one"] == ENDPOINTS  # type: ignore[index]


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
