"""Are two endpoints the same engine?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvproxy.doctor.checks.chat import TRIAL_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.exposition import Counters, counters
from kvproxy.doctor.finding import Finding, ok, problem
from kvproxy.doctor.site import Site, known

Window = tuple[Counters, Counters]


@dataclass(frozen=True, slots=True)
class DuplicatesCheck:
    """Every engine counts what it does: two endpoints that count the same are one."""

    site: Site

    name = "duplicates"
    calls = TRIAL_CALLS + 2
    where = "endpoints"

    async def find(self) -> Sequence[Finding]:
        tried = await known(self.site.engines, lambda engine: engine.trial())
        first = await known(tuple(tried), lambda engine: engine.exposition_now())
        second = await known(tuple(first), lambda engine: engine.exposition_now())
        windows: dict[Engine, Window] = {}
        for engine in second:
            earlier, later = counters(first[engine]), counters(second[engine])
            if earlier is not None and later is not None and earlier.used:
                windows[engine] = earlier, later
        if len(windows) < 2:
            return []
        return list(_same(windows)) or [ok(self.where, f"{len(windows)} different engines")]


def _same(windows: Mapping[Engine, Window]) -> Iterator[Finding]:
    for one, other in combinations(windows, 2):
        if overlap(windows[one], windows[other]):
            what = f"is the same engine as {one.where}: its load is counted apart, and its cache twice"
            yield problem(other.where, what, f"correct its url, or remove it: {one.origin} and {other.origin} are one")


def overlap(one: Window, other: Window) -> bool:
    """Whether both may have been the same growing figures, each read twice at about the same time."""
    (a1, a2), (b1, b2) = one, other
    figures = zip(a1.values, a2.values, b1.values, b2.values, strict=True)
    return all(a_from <= b_to and b_from <= a_to for a_from, a_to, b_from, b_to in figures)
