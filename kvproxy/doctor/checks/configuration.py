"""What the configuration itself gets wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.errors import Problem

_NAME = "configuration"


@dataclass(frozen=True, slots=True)
class ConfigurationCheck:
    """Passes on what `kvproxy check` found."""

    problems: Sequence[Problem]
    undiscovered: Sequence[Finding] = ()

    name = _NAME
    calls = 1
    where = "configuration"

    async def find(self) -> Sequence[Finding]:
        found = [*configuration_findings(self.problems), *self.undiscovered]
        return found or [ok(self.where, "no errors, no warnings")]


def configuration_findings(problems: Sequence[Problem]) -> Iterator[Finding]:
    """Errors are problems, warnings warnings; notes say what is done on purpose."""
    for one in problems:
        where = ": ".join(part for part in (one.place, one.path) if part) or "configuration"
        if one.severity == "note":
            found = ok(where, one.message)
        else:
            make = problem if one.severity == "error" else warning
            found = make(where, one.message, one.hint)
        yield replace(found, check=_NAME)
