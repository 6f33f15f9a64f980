"""Slots for LoRA adapters, as vLLM has them: requests of so many adapters run at the same time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

#: What runs and what waits, as lists of names, and when an engine step last had it so.
Combination = tuple[str, str]


class LoraSlots:
    """An adapter stays loaded until another one needs its slot, the one least recently used first. `slots` 0: there is
    room for all."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._seen: dict[Combination, float] = {}

    @property
    def seen(self) -> Mapping[Combination, float]:
        """Every combination there was; vLLM shows them all for ever."""
        return self._seen

    def admits(self, adapter: str | None, running: Iterable[str | None]) -> bool:
        """Whether a request of it may run beside those that do. (vLLM passes over a request that may not; here it holds
        up those behind it.)"""
        in_use = {each for each in running if each is not None}
        return not self._slots or adapter is None or adapter in in_use or len(in_use) < self._slots

    def take(self, adapter: str | None, running: Iterable[str | None]) -> bool:
        """A request of it begins. Whether it has to be loaded first."""
        if adapter is None:
            return False
        missing = adapter not in self._loaded
        self._loaded[adapter] = None
        self._loaded.move_to_end(adapter)
        in_use = set(running)
        while self._slots and len(self._loaded) > self._slots:
            del self._loaded[next(each for each in self._loaded if each not in in_use)]
        return missing

    def note(self, running: Iterable[str | None], waiting: Iterable[str | None], now: float) -> None:
        """How it stands in an engine step."""
        names = [",".join(sorted({each for each in some if each is not None})) for some in (running, waiting)]
        self._seen[names[0], names[1]] = now
