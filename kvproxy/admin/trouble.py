"""One finding among what an operator should know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvproxy.cluster.endpoint import Condition, Endpoint

#: Out of the rotation by its own fault. An endpoint that an operator drains is not.
DOWN = frozenset({Condition.UNHEALTHY, Condition.EJECTED, Condition.BREAKER_OPEN})
#: Named one by one; of more in a cluster there is one finding.
NAMED = 3


class Rank(IntEnum):
    """What hurts most comes first."""

    DOWN = 0
    SOURCES = 1
    FAILED = 2
    REST = 3


@dataclass(frozen=True, slots=True)
class Trouble:
    """One finding; a FindingLike. `key` is what it is about: its age goes on while that stays."""

    key: tuple[str, ...]
    rank: Rank
    severity: str
    where: str
    what: str
    fix: str = ""
    patience_s: float = 0.0  # shown once it has lasted so long


def list_names(endpoints: Sequence[Endpoint]) -> str:
    """The first few, and how many more."""
    named = ", ".join(one.id for one in endpoints[:NAMED])
    return f"{named} and {len(endpoints) - NAMED} more" if len(endpoints) > NAMED else named


def source_trouble(key: tuple[str, ...], where: str, what: str, fix: str, *, patience_s: float = 0.0) -> Trouble:
    """A source of facts that is lost or not believed."""
    return Trouble(key, Rank.SOURCES, "warning", where, what, fix, patience_s)
