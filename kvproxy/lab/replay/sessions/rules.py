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
_PLACES = re.compile(r"places=([1-9]\d{0,5})")


def find_rule(name: str) -> MakeRule | None:
    """Return the rule of this name, if there is one; `places=N` is the bound with N sessions an endpoint."""
    if match := _PLACES.fullmatch(name):
        limit = int(match[1])
        return lambda timing: Places(limit)
    return RULES.get(name)
