"""Base of what owns one background task: it runs between entering and leaving an `async with`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Self


class BackgroundTask(ABC):
    """Runs `_run` as a task named `task_name` from entering to leaving; there it is cancelled and awaited, whatever it
    ended with."""

    task_name: str
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=self.task_name)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None: ...
