"""Which models the engines serve by their own lists, so that metrics may name models that no configuration names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

from kvproxy.types import Clock

log = logging.getLogger(__name__)

#: Models told apart by metrics although no configuration names them, and the longest name of one.
MAX_LISTED, MAX_NAME = 50, 200
#: The engines are asked so long after a request for a model that is not known, and not again before that much later.
DELAY_S, AGAIN_S = 1.0, 60.0


class ServedModels:
    """Entered, it asks the engines (`ask`: the names they list) when a client names a model that is not known; clients
    cannot make it ask more than once a minute, and what engines do not list stays unknown."""

    def __init__(self, ask: Callable[[], Awaitable[Iterable[str]]], *, clock: Clock, delay_s: float = DELAY_S) -> None:
        self._ask = ask
        self._clock = clock
        self._delay_s = delay_s
        self._listed: frozenset[str] = frozenset()
        self._again_at = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def serves(self, model: str) -> bool:
        """Whether some engine listed it when they were asked last. A model that none did has them asked, later."""
        if model in self._listed:
            return True
        if self._loop is not None and (now := self._clock()) >= self._again_at:
            self._again_at = now + AGAIN_S
            self._timer = self._loop.call_later(self._delay_s, self._begin)
        return False

    def _begin(self) -> None:
        self._asking = asyncio.create_task(self._look(), name="list served models")

    async def _look(self) -> None:
        try:
            names = {name for name in await self._ask() if 0 < len(name) <= MAX_NAME}
        except Exception:
            log.exception("the engines' lists of models cannot be read")
            return
        if names:  # otherwise no engine answered, and what was known goes on
            self._listed = frozenset(sorted(names, key=lambda name: (name not in self._listed, name))[:MAX_LISTED])
