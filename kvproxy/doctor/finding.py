"""What a check has to say: data, whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"  # looked at, and well
    WARNING = "warning"  # works, but not as it could
    PROBLEM = "problem"  # something does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What, where, and what to do about it. Texts hold no credentials and no prompt text.

    `causes` are possible reasons with their cures, the likeliest first, where one fix cannot be named.
    """

    severity: Severity
    where: str
    what: str
    fix: str = ""
    causes: tuple[str, ...] = ()
    check: str = ""


def ok(where: str, what: str) -> Finding:
    """Looked at, and well; `what` is what was measured."""
    return Finding(Severity.OK, where, what)


def warning(where: str, what: str, fix: str, causes: tuple[str, ...] = ()) -> Finding:
    """Works, but not as it could."""
    return Finding(Severity.WARNING, where, what, fix, causes)


def problem(where: str, what: str, fix: str, causes: tuple[str, ...] = ()) -> Finding:
    """Something does not work."""
    return Finding(Severity.PROBLEM, where, what, fix, causes)
