"""One generation follows another: new parts start before it, needless ones end after their last request."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from kvproxy.cluster.cluster import Cluster
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
        """Start the parts that do not run yet; if one cannot start, end those again and raise its error."""
        begun: list[Part] = []
        try:
            for part in generation.parts:
                if part not in self._alive:
                    stack = AsyncExitStack()
                    await stack.enter_async_context(part)
                    self._alive[part] = stack
                    begun.append(part)
        except BaseException:
            await self._end(begun)
            raise

    def retire(self, before: Generation, after: Generation) -> None:
        """End what only `before` needed, once its last request is over or patience is."""
        task = asyncio.create_task(self._retire(before, after), name="retire generation")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, before: Generation, after: Generation) -> None:
        give_up_at = self._clock() + self._patience_s
        while before.running and self._clock() < give_up_at:  # noqa: ASYNC110 - a count kept on the hot path
            await asyncio.sleep(_LOOK_AGAIN_S)
        needless = [part for part in before.parts if part not in after.parts]
        await self._end(needless)
        for part in needless:
            if isinstance(part, Cluster) and part.name not in after.clusters:
                part.close()
        self.ended += 1

    async def _end(self, parts: list[Part]) -> None:
        for part in reversed(parts):
            stack = self._alive.pop(part, None)
            if stack is None:
                continue
            try:
                await stack.aclose()
            except Exception:
                log.exception("a part of the proxy did not end well")
