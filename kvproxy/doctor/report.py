"""Everything a visit found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvproxy.doctor.finding import Finding, Severity

_ORDER = {Severity.PROBLEM: 0, Severity.WARNING: 1, Severity.OK: 2}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A check that could not look, because of what another check reports."""

    check: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """`findings` are the bad ones, problems first; `passed` the good ones."""

    findings: tuple[Finding, ...]
    passed: tuple[Finding, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], skipped: Iterable[Skipped] = ()) -> Report:
        """Sorted by severity; otherwise place by place, as they were looked at: in the order of the file."""
        found = list(findings)
        places = {where: number for number, where in enumerate(dict.fromkeys(one.where for one in found))}
        ordered = sorted(found, key=lambda one: (_ORDER[one.severity], places[one.where]))
        bad = tuple(one for one in ordered if one.severity is not Severity.OK)
        return cls(bad, tuple(one for one in ordered if one.severity is Severity.OK), tuple(skipped))

    def joined(self, other: Report) -> Report:
        """Both together."""
        findings = (*self.findings, *self.passed, *other.findings, *other.passed)
        return Report.of(findings, (*self.skipped, *other.skipped))

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
        """For JSON."""
        return {
            "problems": self.problems,
            "warnings": self.warnings,
            "findings": [asdict(one) for one in self.findings],
            "passed": [asdict(one) for one in self.passed],
            "skipped": [asdict(one) for one in self.skipped],
        }
