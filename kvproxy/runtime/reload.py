"""One generation follows another: its parts start before it serves, and end when no living generation needs them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from kvproxy.runtime.generation import Generation
from kvproxy.types import Clock

log = logging.getLogger("kvproxy")

_LOOK_AGAIN_S = 0.1

Part = AbstractAsyncContextManager[object]


class Reloader:
    """Owns what runs. Leaving it ends everything, in the reverse order of its start."""

    def __init__(self, *, clock: Clock, patience_s: float) -> None:
        self.ended = 0  # generations
        self._clock = clock
        self._patience_s = patience_s
        self._living: list[Generation] = []
        self._alive: dict[Part, AsyncExitStack] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Reloader:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await self._end(list(self._alive))

    async def begin(self, generation: Generation) -> None:
        """Keep its states and start those of its parts that do not run yet; if one cannot start, undo it and raise its
        error."""
        generation.states.keep()  # at once: the end of an earlier one, meanwhile, must not close what this one found
        self._living.append(generation)
        try:
            for part in generation.parts:
                if part not in self._alive:
                    stack = AsyncExitStack()
                    await stack.enter_async_context(part)
                    self._alive[part] = stack
        except BaseException:
            await self._forget(generation)
            raise

    def retire(self, generation: Generation) -> None:
        """End what only this one needs, once its last request is over or patience is."""
        task = asyncio.create_task(self._retire(generation), name="retire generation")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, generation: Generation) -> None:
        give_up_at = self._clock() + self._patience_s
        while generation.running and self._clock() < give_up_at:  # noqa: ASYNC110 - a count kept on the hot path
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._forget(generation)
        self.ended += 1

    async def _forget(self, generation: Generation) -> None:
        self._living.remove(generation)
        generation.states.release()  # before any wait: a generation built meanwhile must not find what ends here
        needed = [part for other in self._living for part in other.parts]
        await self._end([part for part in generation.parts if part not in needed])

    async def _end(self, parts: list[Part]) -> None:
        for part in reversed(parts):
            stack = self._alive.pop(part, None)
            if stack is None:
                continue
            try:
                await stack.aclose()
            except Exception:
                log.exception("a part of the proxy did not end well")
