"""Result of a visit: findings, the report they make, and its text for the terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial, wraps
from typing import Any, ParamSpec, TextIO

P = ParamSpec("P")

_MARK_WIDTH = 9
_CHECK_WIDTH = 18
_MIN_TEXT = 40


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"  # checked, and good
    WARNING = "warning"  # works, but not as well as it could
    PROBLEM = "problem"  # something does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check: a fact, its place, and the remedy. Texts hold no credentials and no prompt text.

    `causes` are possible reasons with their cures, the likeliest first, where one fix cannot be named."""

    severity: Severity
    where: str
    what: str
    fix: str = ""
    causes: tuple[str, ...] = ()
    check: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question about `where`. `calls` is how many exchanges it waits for, one after another, at most: its deadline.

    `collect` returns the findings, good ones included. A ClientError means that the check was not possible; the check
    that owns the failed exchange reports the cause. `alone`: it measures time, and runs after all the rest."""

    name: str
    where: str
    calls: int
    collect: Callable[[], Awaitable[Sequence[Finding]]]
    alone: bool = False


def check(
    name: str, *, calls: int, where: str = "", alone: bool = False
) -> Callable[[Callable[P, Awaitable[Sequence[Finding]]]], Callable[P, Check]]:
    """Decorate a function that finds: called, it returns a check bound to its arguments. Without `where`, its first
    argument's is used."""

    def make(collect: Callable[P, Awaitable[Sequence[Finding]]]) -> Callable[P, Check]:
        @wraps(collect)
        def bind(*args: P.args, **options: P.kwargs) -> Check:
            subjects: Sequence[Any] = args
            return Check(name, where or subjects[0].where, calls, partial(collect, *args, **options), alone)

        return bind

    return make


def ok(where: str, what: str) -> Finding:
    """Return a good finding; `what` is the measurement."""
    return Finding(Severity.OK, where, what)


def warning(where: str, what: str, fix: str, causes: tuple[str, ...] = ()) -> Finding:
    """Works, but not as it could."""
    return Finding(Severity.WARNING, where, what, fix, causes)


def problem(where: str, what: str, fix: str, causes: tuple[str, ...] = ()) -> Finding:
    """Something does not work."""
    return Finding(Severity.PROBLEM, where, what, fix, causes)


_ORDER = {Severity.PROBLEM: 0, Severity.WARNING: 1, Severity.OK: 2}


@dataclass(frozen=True, slots=True)
class SkippedCheck:
    """A check that could not look, because of what another check reports."""

    check: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """`findings` are the bad ones, problems first; `passed` the good ones."""

    findings: tuple[Finding, ...]
    passed: tuple[Finding, ...] = ()
    skipped: tuple[SkippedCheck, ...] = ()

    @classmethod
    def of_findings(cls, findings: Iterable[Finding], skipped: Iterable[SkippedCheck] = ()) -> DoctorReport:
        """Sorted by severity; otherwise place by place, as they were looked at: in the order of the file."""
        found = list(findings)
        places = {where: number for number, where in enumerate(dict.fromkeys(one.where for one in found))}
        ordered = sorted(found, key=lambda one: (_ORDER[one.severity], places[one.where]))
        bad = tuple(one for one in ordered if one.severity is not Severity.OK)
        return cls(bad, tuple(one for one in ordered if one.severity is Severity.OK), tuple(skipped))

    def merge_report(self, other: DoctorReport) -> DoctorReport:
        """Both together."""
        findings = (*self.findings, *self.passed, *other.findings, *other.passed)
        return DoctorReport.of_findings(findings, (*self.skipped, *other.skipped))

    @property
    def problems(self) -> int:
        return sum(one.severity is Severity.PROBLEM for one in self.findings)

    @property
    def warnings(self) -> int:
        return len(self.findings) - self.problems

    def exit_status(self, *, strict: bool) -> int:
        """0 fine, 1 problems; 2 warnings only, if `strict` asks for it."""
        if self.problems:
            return 1
        return 2 if strict and self.warnings else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "warnings": self.warnings,
            "findings": [asdict(one) for one in self.findings],
            "passed": [asdict(one) for one in self.passed],
            "skipped": [asdict(one) for one in self.skipped],
        }


_MARKS = {Severity.OK: "ok", Severity.WARNING: "warning", Severity.PROBLEM: "PROBLEM"}
_COLOURS = {Severity.OK: "32", Severity.WARNING: "33", Severity.PROBLEM: "31"}


def print_json(report: DoctorReport, out: TextIO) -> None:
    """One object; see docs/doctor.md."""
    print(json.dumps(report.as_dict(), indent=2), file=out)


def print_table(
    report: DoctorReport, out: TextIO, *, width: int = 120, colour: bool = False, verbose: bool = False
) -> None:
    """Print the passed checks (one by one if `verbose`), the skipped ones, the faults with their fixes (the worst
    last), and the verdict."""
    for one in report.passed if verbose else ():
        print(_finding_line(one, width=width, colour=colour), file=out)
    if report.passed and report.findings and not verbose:
        print(f"{_count(len(report.passed), 'check')} passed (-v lists them)", file=out)
    for line in _skipped(report.skipped, width=width, verbose=verbose):
        print(line, file=out)
    for one in sorted(report.findings, key=lambda each: each.severity is Severity.PROBLEM):
        print(file=out)
        print(_finding_line(one, width=width, colour=colour), file=out)
        for line in _advice(one, width):
            print(line, file=out)
    print(f"\n{summarize_report(report, verbose=verbose)}", file=out)


def summarize_report(report: DoctorReport, *, verbose: bool = False) -> str:
    """Return the last line."""
    if not report.findings:
        return f"All checks passed ({_count(len(report.passed), 'check')}{'' if verbose else '; -v lists them'})."
    return f"{_count(report.problems, 'problem')}, {_count(report.warnings, 'warning')}."


def _skipped(skipped: Sequence[SkippedCheck], *, width: int, verbose: bool) -> Iterator[str]:
    """Those of one reason in one line, unless each is asked for."""
    groups: dict[tuple[object, ...], list[SkippedCheck]] = {}
    for one in skipped:
        groups.setdefault((one.where, one.reason, one.check if verbose else ""), []).append(one)
    for (where, reason, _), group in groups.items():
        first = group[0].check if len(group) == 1 else _count(len(group), "check")
        names = f" ({', '.join(one.check for one in group)})" if len(group) > 1 else ""
        text = f"\n{' ' * (_MARK_WIDTH + _CHECK_WIDTH)}".join(_wrapped(f"{where}: {reason}{names}", width))
        yield f"{'skipped':<{_MARK_WIDTH}}{first:<{_CHECK_WIDTH}}{text}"


def _finding_line(one: Finding, *, width: int, colour: bool) -> str:
    mark = f"{_MARKS[one.severity]:<{_MARK_WIDTH}}"
    if colour:
        mark = f"\x1b[{_COLOURS[one.severity]}m{mark}\x1b[0m"
    lines = _wrapped(f"{one.where}: {one.what}", width)
    return f"{mark}{one.check:<{_CHECK_WIDTH}}" + f"\n{' ' * (_MARK_WIDTH + _CHECK_WIDTH)}".join(lines)


def _advice(one: Finding, width: int) -> Iterator[str]:
    margin = " " * (_MARK_WIDTH + _CHECK_WIDTH)
    for index, line in enumerate(_wrapped(one.fix, width - 5) if one.fix else ()):
        yield f"{margin}{'fix: ' if index == 0 else '     '}{line}"
    for cause in one.causes:
        for index, line in enumerate(_wrapped(cause, width - 5)):
            yield f"{margin}{'   - ' if index == 0 else '     '}{line}"


def _wrapped(text: str, width: int) -> list[str]:
    room = max(width - _MARK_WIDTH - _CHECK_WIDTH, _MIN_TEXT)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
