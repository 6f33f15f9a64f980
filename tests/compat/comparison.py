"""Outcomes of one suite, run straight and through kvproxy, and what differs beyond a written list."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PASSED, FAILED, SKIPPED, MISSING = "passed", "failed", "skipped", "missing"
_WILDCARD = "*"


@dataclass(frozen=True, slots=True)
class Difference:
    """One test that ended differently through kvproxy. `reason` is empty for one that is not on the list."""

    test: str
    straight: str
    through: str
    reason: str = ""

    def __str__(self) -> str:
        known = f" (expected: {self.reason})" if self.reason else ""
        return f"{self.test}: {self.straight} straight, {self.through} through kvproxy{known}"


def read_outcomes(report: str) -> dict[str, str]:
    """Return the outcome of each test of a JUnit report, by `classname::name`. Raises ParseError."""
    cases = ElementTree.fromstring(report).iter("testcase")
    return {f"{case.get('classname', '')}::{case.get('name', '')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return FAILED
    return SKIPPED if "skipped" in kinds else PASSED


def read_expected(text: str) -> dict[str, str]:
    """Return the reasons of the written list by test. Raises ValueError for a line without a reason."""
    expected = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        test, colon, reason = line.partition(" : ")
        if not (colon and test.strip() and reason.strip()):
            raise ValueError(f"line {number}: expected `TEST : REASON`, not {line!r}")
        expected[test.strip()] = reason.strip()
    return expected


def compare(
    straight: Mapping[str, str], repeated: Mapping[str, str], through: Mapping[str, str], expected: Mapping[str, str]
) -> list[Difference]:
    """Return the tests that end alike in two runs straight to the engine, and otherwise through kvproxy. A test that
    differs between the straight runs, or fails in both, proves nothing."""
    found = []
    for test in usable(straight, repeated):
        ended = through.get(test, MISSING)
        if ended != straight[test]:
            found.append(Difference(test, straight[test], ended, _reason(test, expected)))
    return found


def usable(straight: Mapping[str, str], repeated: Mapping[str, str]) -> list[str]:
    """Return the tests that end alike in two runs straight to the engine, and neither fail nor are skipped."""
    return [
        test
        for test, ended in sorted(straight.items())
        if ended == repeated.get(test) and ended not in {FAILED, SKIPPED}
    ]


def _reason(test: str, expected: Mapping[str, str]) -> str:
    if test in expected:
        return expected[test]
    prefixes = (name for name in expected if name.endswith(_WILDCARD) and test.startswith(name[:-1]))
    return next((expected[name] for name in prefixes), "")


def unused(expected: Iterable[str], differences: Iterable[Difference]) -> list[str]:
    """Return the lines of the list that no difference needs any more."""
    tests = [difference.test for difference in differences]
    return [
        name
        for name in expected
        if not any(test.startswith(name[:-1]) if name.endswith(_WILDCARD) else test == name for test in tests)
    ]
