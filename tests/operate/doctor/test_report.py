"""Order, exit status, JSON and table of findings."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from kvproxy.operate.doctor.report import (
    DoctorReport,
    Finding,
    SkippedCheck,
    check,
    ok,
    print_json,
    print_table,
    problem,
    summarize_report,
    warning,
)

BAD = problem("endpoint a", "does not work", "mend it", ("it is broken", "it was never whole"))
ODD = warning("endpoint b", "works badly", "oil it")
GOOD = ok("endpoint c", "works")
SKIPPED = SkippedCheck("lookup", "endpoint a", "cannot be connected to")


async def test_a_check_of_a_named_place_needs_no_subject() -> None:
    """Such as one of a feature that looks at no engine."""

    @check("voice", calls=1, where="a place")
    async def check_voice() -> Sequence[Finding]:
        return [GOOD]

    made = check_voice()
    assert (made.where, await made.collect()) == ("a place", [GOOD])


def test_problems_come_first() -> None:
    """Then warnings; what is well stands apart."""
    report = DoctorReport.of_findings([GOOD, ODD, BAD], [SKIPPED])
    assert report.findings == (BAD, ODD)
    assert report.passed == (GOOD,)
    assert (report.problems, report.warnings) == (1, 1)


def test_exit_status() -> None:
    """1 for problems; warnings count only when asked; what is well never does."""
    assert DoctorReport.of_findings([BAD, ODD]).exit_status(strict=False) == 1
    assert DoctorReport.of_findings([ODD]).exit_status(strict=False) == 0
    assert DoctorReport.of_findings([ODD]).exit_status(strict=True) == 2
    assert DoctorReport.of_findings([GOOD]).exit_status(strict=True) == 0


def test_joining_reports() -> None:
    """In order of severity again."""
    both = DoctorReport.of_findings([ODD, GOOD]).merge_report(DoctorReport.of_findings([BAD], [SKIPPED]))
    assert both == DoctorReport((BAD, ODD), (GOOD,), (SKIPPED,))


def test_json() -> None:
    """One object with everything a script wants."""
    out = io.StringIO()
    print_json(DoctorReport.of_findings([GOOD, BAD], [SKIPPED]), out)
    shown = json.loads(out.getvalue())
    assert (shown["problems"], shown["warnings"]) == (1, 0)
    assert shown["findings"] == [
        {
            "severity": "problem",
            "where": "endpoint a",
            "what": "does not work",
            "fix": "mend it",
            "causes": ["it is broken", "it was never whole"],
            "check": "",
        }
    ]
    assert [one["what"] for one in shown["passed"]] == ["works"]
    assert shown["skipped"] == [{"check": "lookup", "where": "endpoint a", "reason": "cannot be connected to"}]


def test_table() -> None:
    """Good checks take one line, faults have fixes and causes, the worst just before the verdict."""
    out = io.StringIO()
    print_table(DoctorReport.of_findings([GOOD, ODD, BAD], [SKIPPED]), out)
    text = out.getvalue()
    lines = [line.strip() for line in text.splitlines()]
    assert lines[-1] == "1 problem, 1 warning."
    assert "fix: mend it" in lines
    assert "- it was never whole" in lines
    assert text.index("works badly") < text.index("does not work")
    assert "skipped  lookup            endpoint a: cannot be connected to" in text
    assert "\x1b" not in text


def test_table_of_a_narrow_terminal() -> None:
    """Long texts are wrapped within their column, and colours do not disturb it."""
    out = io.StringIO()
    print_table(DoctorReport.of_findings([problem("here", "word " * 40, "fix " * 40)]), out, width=80, colour=True)
    lines = out.getvalue().splitlines()
    assert any(line.startswith("\x1b[31mPROBLEM") for line in lines)
    assert all(len(line.replace("\x1b[31m", "").replace("\x1b[0m", "")) <= 80 for line in lines)


def test_verdict_when_all_is_well() -> None:
    """Says how much was looked at."""
    assert summarize_report(DoctorReport.of_findings([GOOD])) == "All checks passed (1 check; -v lists them)."
    assert summarize_report(DoctorReport.of_findings([GOOD]), verbose=True) == "All checks passed (1 check)."


def test_healthy_states_are_folded() -> None:
    """One line for all of it, unless it is asked for; a finding without a cure has no line for one."""
    out = io.StringIO()
    print_table(DoctorReport.of_findings([GOOD, warning("config.yaml:3:1: x", "odd", "")]), out)
    assert out.getvalue().splitlines()[0] == "1 check passed (-v lists them)"
    assert "endpoint c" not in out.getvalue()
    assert "fix:" not in out.getvalue()
    out = io.StringIO()
    print_table(DoctorReport.of_findings([GOOD, ODD]), out, verbose=True)
    assert "endpoint c: works" in out.getvalue()
