"""What outlives a reload: states by type and name, for as long as a generation that lives uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

log = logging.getLogger("kvproxy")

T = TypeVar("T")

Key = tuple[type, Hashable]
Close = Callable[[Any], None]


class StateStore:
    """Knows the states of the living generations and nothing else: what none of them uses is forgotten by that."""

    def __init__(self) -> None:
        self._living: list[GenerationStates] = []  # the oldest first

    def draft(self) -> GenerationStates:
        """For a generation that is being built: it finds what is there, and adds nothing before it is kept."""
        return GenerationStates(self._living)


class GenerationStates:
    """The states one generation uses; asked for while it is built, kept while it lives."""

    def __init__(self, living: list[GenerationStates]) -> None:
        self._living = living
        self._used: dict[Key, object] = {}
        self._closes: dict[Key, Close] = {}

    def get(
        self, kind: type[T], name: Hashable, make: Callable[[], T], *, close: Callable[[T], None] | None = None
    ) -> T:
        """The state of this kind and name: this generation's, else that of the latest living one that has it, else a
        new one, whose making must have no effect beyond itself. `close` is called once no living generation uses it.
        """
        key = (kind, name)
        if key not in self._used:
            earlier = (other._used[key] for other in reversed(self._living) if key in other._used)
            found = next(earlier, None)
            self._used[key] = make() if found is None else found
            if close is not None:
                self._closes[key] = close
        return cast("T", self._used[key])

    def next_of(self, kind: type[T], make: Callable[[], T]) -> T:
        """The state of the next part that asks for this kind without a name: one with the same place among its equals
        finds it."""
        place = 0
        while (kind, place) in self._used:
            place += 1
        return self.get(kind, place, make)

    def all_of(self, kind: type[T]) -> list[T]:
        """Those of this kind, in the order in which they were asked for."""
        return [cast("T", state) for (of, _), state in self._used.items() if of is kind]

    def keep(self) -> None:
        """The generation lives from now on."""
        self._living.append(self)

    def release(self) -> None:
        """The generation lives no longer: what only it used is closed and forgotten."""
        self._living.remove(self)
        for key, close in self._closes.items():
            state = self._used[key]
            if any(other._used.get(key) is state for other in self._living):
                continue
            try:
                close(state)
            except Exception:
                log.exception("a state that no configuration uses any more cannot be closed")
