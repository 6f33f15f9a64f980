"""Facts that several checks need are asked for once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Answers:
    """By name, one task each; everybody who asks gets the same answer or the same error.

    A check that gives up does not take the answer away from the others. An async context manager: leaving it ends
    what is still being asked.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def once(self, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer under `name`; the first caller's `ask` gets it."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.create_task(ask(), name=f"doctor {name}")
        return cast("T", await asyncio.shield(task))

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
