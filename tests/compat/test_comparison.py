"""The comparison of two runs of other people's tests."""

from __future__ import annotations

import pytest

from tests.compat.comparison import Difference, compare, read_expected, read_outcomes, unused

REPORT = """<testsuites><testsuite>
<testcase classname="t.test_chat" name="test_a"/>
<testcase classname="t.test_chat" name="test_b"><failure message="no"/></testcase>
<testcase classname="t.test_chat" name="test_c"><skipped/></testcase>
<testcase classname="t.test_chat" name="test_d"><error message="no fixture"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_by_test() -> None:
    outcomes = read_outcomes(REPORT)
    assert outcomes == {
        "t.test_chat::test_a": "passed",
        "t.test_chat::test_b": "failed",
        "t.test_chat::test_c": "skipped",
        "t.test_chat::test_d": "failed",
    }


@pytest.mark.parametrize("through", [{"a": "failed"}, {"a": "skipped"}, {}], ids=["failed", "skipped", "missing"])
def test_a_test_that_passes_straight_alone_is_a_difference(through: dict[str, str]) -> None:
    straight = {"a": "passed"}
    found = compare(straight, straight, through, {})
    assert found == [Difference("a", "passed", through.get("a", "missing"))]


@pytest.mark.parametrize(
    ("first", "second", "through"),
    [
        ("passed", "passed", "passed"),
        ("failed", "failed", "failed"),
        ("failed", "failed", "passed"),
        ("passed", "failed", "failed"),
    ],
    ids=["passes", "fails on both", "passes through alone", "differs by itself"],
)
def test_inconclusive_requests_are_no_difference(first: str, second: str, through: str) -> None:
    assert compare({"a": first}, {"a": second}, {"a": through}, {}) == []


@pytest.mark.parametrize("line", ["m::a : why", "m::* : why"])
def test_a_difference_on_the_list_has_its_reason(line: str) -> None:
    straight = {"m::a": "passed"}
    (found,) = compare(straight, straight, {"m::a": "failed"}, read_expected(f"# comment\n\n{line}\n"))
    assert found.reason == "why"
    assert str(found) == "m::a: passed straight, failed through kvproxy (expected: why)"


@pytest.mark.parametrize("line", ["m::a", "m::a : ", " : why"])
def test_a_line_without_a_reason_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        read_expected(line)


def test_lines_that_nothing_needs_are_named() -> None:
    found = [Difference("m::a", "passed", "failed", "why")]
    assert unused(["m::a", "m::*", "n::a", "n::*"], found) == ["n::a", "n::*"]
