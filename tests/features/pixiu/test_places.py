"""Places of problems in a file of Pixiu, and files full of junk."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproxy.operate.config.load import check_config
from tests.features.pixiu.pixiu_files import DOCUMENTATION, PLACEHOLDERS, sample
from tests.operate.config.test_robustness import CHANGES, check_changed
from tests.support.examples import examples

PIXIU = sample()
EXCERPT = yaml.safe_load(DOCUMENTATION)


def test_unset_variables_of_a_pixiu_file_are_all_that_is_said() -> None:
    """One error for each variable, at its place, and none that follows from the empty text."""
    _, problems = check_config(PLACEHOLDERS, env={})
    errors = [one for one in problems if one.severity == "error"]
    assert {one.message.split(" ")[0] for one in errors} == {"environment"}
    lines = PLACEHOLDERS.splitlines()
    assert errors
    assert all("${" in lines[one.line - 1] for one in errors)


def test_the_place_of_a_pixiu_files_problem() -> None:
    """With Pixiu's long paths the line is what helps."""
    broken = PLACEHOLDERS.replace("cache_strategy:", "cache_stratgy:", 1)
    _, problems = check_config(broken, env={})
    typo = next(one for one in problems if "cache_stratgy" in one.path)
    assert "cache_stratgy:" in broken.splitlines()[typo.line - 1]


@settings(max_examples=examples(100))
@given(st.sampled_from([PIXIU, EXCERPT]), CHANGES)
def test_junk_anywhere_is_a_problem_or_nothing(base: dict[str, Any], changes: list[tuple[int, Any]]) -> None:
    """A configuration is given exactly when no problem is an error, lenient or not."""
    check_changed(base, changes)
