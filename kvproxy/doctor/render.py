"""A report for people, and for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from kvproxy.doctor.finding import Finding, Severity
from kvproxy.doctor.report import Report, Skipped

_MARKS = {Severity.OK: "ok", Severity.WARNING: "warning", Severity.PROBLEM: "PROBLEM"}
_COLOURS = {Severity.OK: "32", Severity.WARNING: "33", Severity.PROBLEM: "31"}
_MARK_WIDTH, _CHECK_WIDTH, _MIN_TEXT = 9, 18, 40


def print_json(report: Report, out: TextIO) -> None:
    """One object; see docs/doctor.md."""
    print(json.dumps(report.as_dict(), indent=2), file=out)


def print_table(report: Report, out: TextIO, *, width: int = 120, colour: bool = False, verbose: bool = False) -> None:
    """What is well (one by one if `verbose`), what could not be looked at, what is wrong with its fix (the worst
    last), the verdict."""
    for one in report.passed if verbose else ():
        print(_line(one, width=width, colour=colour), file=out)
    if report.passed and report.findings and not verbose:
        print(f"{_count(len(report.passed), 'check')} passed (-v lists them)", file=out)
    for line in _skipped(report.skipped, width=width, verbose=verbose):
        print(line, file=out)
    for one in sorted(report.findings, key=lambda each: each.severity is Severity.PROBLEM):
        print(file=out)
        print(_line(one, width=width, colour=colour), file=out)
        for line in _advice(one, width):
            print(line, file=out)
    print(f"\n{verdict(report, verbose=verbose)}", file=out)


def verdict(report: Report, *, verbose: bool = False) -> str:
    """The last line."""
    if not report.findings:
        return f"Everything is well ({_count(len(report.passed), 'check')}{'' if verbose else '; -v lists them'})."
    return f"{_count(report.problems, 'problem')}, {_count(report.warnings, 'warning')}."


def _skipped(skipped: Sequence[Skipped], *, width: int, verbose: bool) -> Iterator[str]:
    """Those of one reason in one line, unless each is asked for."""
    groups: dict[tuple[object, ...], list[Skipped]] = {}
    for one in skipped:
        groups.setdefault((one.where, one.reason, one.check if verbose else ""), []).append(one)
    for (where, reason, _), group in groups.items():
        first = group[0].check if len(group) == 1 else _count(len(group), "check")
        names = f" ({', '.join(one.check for one in group)})" if len(group) > 1 else ""
        text = f"\n{' ' * (_MARK_WIDTH + _CHECK_WIDTH)}".join(_wrapped(f"{where}: {reason}{names}", width))
        yield f"{'skipped':<{_MARK_WIDTH}}{first:<{_CHECK_WIDTH}}{text}"


def _line(one: Finding, *, width: int, colour: bool) -> str:
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
