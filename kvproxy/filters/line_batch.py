"""Lines for a logger, many in one record: a record for each, and waking the thread that writes it, costs more than a
pick."""

from __future__ import annotations

import asyncio
import logging

#: A line waits no longer than this, and no more lines than that wait.
DELAY_S = 0.1
MAX_LINES = 256


class LineBatch:
    """Entered, it gathers lines; before and after, each goes out at once."""

    def __init__(self, logger: logging.Logger, *, delay_s: float = DELAY_S) -> None:
        self._logger = logger
        self._delay_s = delay_s
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> LineBatch:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        self.flush()

    @property
    def wanted(self) -> bool:
        """Whether anybody will see a line."""
        return self._logger.isEnabledFor(logging.INFO)

    def add(self, line: str) -> None:
        """One line, without line breaks in it."""
        self._lines.append(line)
        if self._loop is None or len(self._lines) >= MAX_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self.flush)

    def flush(self) -> None:
        """Whatever waits goes out."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            text = "\n".join(self._lines)
            self._lines.clear()
            # Logger.info would look for its caller, who is always this line.
            record = self._logger.makeRecord(self._logger.name, logging.INFO, __file__, 0, text, (), None)
            self._logger.handle(record)
