"""The rules by the names that `--policy` has for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kvproxy.lab.replay.sessions.places import Places
from kvproxy.lab.replay.sessions.router import SessionRule
from kvproxy.lab.replay.sessions.thunderagent import ThunderAgent
from kvproxy.lab.replay.sessions.vllm_router import VllmRouter
from kvproxy.lab.simulator.timing import EngineTiming

#: Makes a rule for engines of this speed.
MakeRule = Callable[[EngineTiming], SessionRule]

RULES: Mapping[str, MakeRule] = {
    "thunderagent": lambda timing: ThunderAgent(),
    "vllm_router": VllmRouter,
}
#: The bound with the best number of sessions, which is found by trying.
BEST_PLACES = "places"
_PLACES = re.compile(r"places=([1-9]\d{0,5})")


def find_best_places(measure: Callable[[int], float], most: int) -> int:
    """Return the number of sessions an endpoint, at most `most`, of which `measure` gives the highest figure, where it
    rises up to some number and falls from there; in about two tries for each doubling."""
    known: dict[int, float] = {}

    def value(places: int) -> float:
        if places not in known:
            known[places] = measure(places)
        return known[places]

    best = 1
    while best < most and value(min(most, 2 * best)) > value(best):
        best = min(most, 2 * best)
    step = best // 2
    while step:
        best = max((each for each in (best - step, best, best + step) if 1 <= each <= most), key=value)
        step //= 2
    return best


def find_rule(name: str) -> MakeRule | None:
    """Return the rule of this name, if there is one; `places=N` is the bound with N sessions an endpoint."""
    if match := _PLACES.fullmatch(name):
        limit = int(match[1])
        return lambda timing: Places(limit)
    return RULES.get(name)
