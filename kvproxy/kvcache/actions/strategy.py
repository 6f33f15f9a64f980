"""What is done to keep KV cache useful: one class each, all decisions, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproxy.kvcache.actions.hotness import KnownPrefix
from kvproxy.kvcache.actions.signals import Pressure
from kvproxy.kvcache.providers import ActionKind

#: What bears on an instance now.
PressureOf = Callable[[str], Pressure]


@dataclass(frozen=True, slots=True)
class Served:
    """A response that just ended, and the prefixes of its prompt, shortest first."""

    instance_id: str
    prefixes: Sequence[KnownPrefix]


@dataclass(frozen=True, slots=True)
class Action:
    """Something to be done at one instance. `prefix` None: to all it holds in a location."""

    kind: ActionKind
    instance_id: str
    prefix: KnownPrefix | None
    reason: str


class Strategy(Protocol):
    """Decides after each response. `taken` holds the heads of prefixes nobody may drop or shrink in this pass; a
    strategy adds those it acts on, so that no prefix is pinned and evicted at once."""

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        """What to do now."""
        ...

    def done(self, action: Action, now: float) -> None:
        """An action of this strategy had its effect."""
        ...
