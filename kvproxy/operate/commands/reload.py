"""Hot reload: the configuration file is read again on SIGHUP, when it changed, or when the operator asks."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.timed_thread import TimedThread
from kvproxy.base.types import Clock, utc_seconds
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.config.changes import summarise_changes
from kvproxy.operate.config.schema import Config
from kvproxy.operate.metrics.process import ProcessMetrics
from kvproxy.operate.runtime.operated import (
    ConfigFinding,
    ConfigReloader,
    Event,
    OperatorFinding,
    RefusedFile,
    Reloaded,
)

logger = logging.getLogger("kvproxy")

Signature = tuple[int, int, int]
#: A read that takes longer means a disk that hangs.
_LOAD_TIMEOUT_S = 30.0
#: Reloads kept for the live page.
_KEPT_EVENTS = 20


#: Interval at which the file is looked at.
FILE_INTERVAL_S = 2.0


class Reloadable(Protocol):
    """A proxy, or several workers together."""

    findings: Sequence[OperatorFinding]
    reloader: ConfigReloader | None

    @property
    def config(self) -> Config: ...
    @property
    def metrics(self) -> Metrics: ...
    async def reload(self, config: Config) -> Reloaded:
        """Whole or, with ConfigError or whatever a part raises, not at all."""
        ...


class FileReloader:
    """Applies a file to what runs: whole or not at all, one reload at a time.

    While entered it watches the file, every `interval_s` (0: never).
    """

    def __init__(
        self,
        proxy: Reloadable,
        source: ConfigSource,
        *,
        interval_s: float,
        clock: Clock = time.monotonic,
        wall_clock: Clock = utc_seconds,
    ) -> None:
        self.file_name = "" if source.path is None else os.path.basename(source.path)
        self.loaded_at = clock()
        self.refusal: RefusedFile | None = None
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._clock = clock
        self._wall_clock = wall_clock
        self._proxy = proxy
        self._source = source
        self._interval_s = interval_s
        self._one_at_a_time = asyncio.Lock()
        self._reading = TimedThread("configuration")
        self._looking = TimedThread("watch the configuration")
        self._watching: asyncio.Task[None] | None = None
        self._seen = self._signature()

    async def __aenter__(self) -> FileReloader:
        self._proxy.reloader = self
        if self._interval_s > 0 and self._source.path is not None:
            self._watching = asyncio.create_task(self._watch(), name="watch the configuration")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._proxy.reloader = None
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def __call__(self) -> Reloaded:
        """Read, check and apply the file. A bad file changes nothing; the errors are returned."""
        async with self._one_at_a_time:
            try:
                config, problems = await self._read()
                before = self._proxy.config
                reloaded = await self._proxy.reload(config)
            except ConfigError as error:
                return self._refused(error.problems)
            except Exception as error:  # a part that cannot start: after any error the old ones still run
                logger.exception("the new configuration cannot be started")
                return self._refused([Problem("", f"a part cannot be started: {type(error).__name__}: {error}")])
            self._note_applied()
            self._proxy.findings = convert_problems(problems)
            self._proxy.metrics.group(ProcessMetrics).reloads.labels("applied").inc()
            later = ", ".join(reloaded.after_restart)
            changed = summarise_changes(before, config)
            logger.info("configuration reloaded: %s%s", changed, f"; after a restart: {later}" if later else "")
            return reloaded

    async def _read(self) -> tuple[Config, list[Problem]]:
        try:
            self._seen = await self._reading.call(self._signature, timeout_s=_LOAD_TIMEOUT_S)
            return await self._reading.call(self._source.load, timeout_s=_LOAD_TIMEOUT_S)
        except OSError as error:
            raise ConfigError([Problem("", f"the file cannot be read: {str(error) or 'its disk hangs'}")]) from error

    def _refused(self, errors: list[Problem]) -> Reloaded:
        self._proxy.metrics.group(ProcessMetrics).reloads.labels("refused").inc()
        for error in errors:
            logger.error("configuration not reloaded: %s", error.located())
        now = self._clock()
        self.refusal = RefusedFile(tuple(errors), now - self._file_age_s())
        self.events.append(Event(now, "warn", f"{self.file_name or 'configuration'} refused: {errors[0].message}"))
        return Reloaded(errors=tuple(errors))

    def _note_applied(self) -> None:
        self.loaded_at = self._clock()
        self.refusal = None
        self.events.append(Event(self.loaded_at, "good", f"{self.file_name or 'configuration'} reloaded"))

    def _file_age_s(self) -> float:
        """Seconds since the file was written, as far as it was seen last."""
        return 0.0 if self._seen is None else max(0.0, self._wall_clock() - self._seen[0] / 1e9)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                signature = await self._looking.call(self._signature, timeout_s=_LOAD_TIMEOUT_S)
            except OSError:  # its disk hangs: the served configuration stays, and a requested reload reports it
                continue
            if signature is not None and signature != self._seen:
                await self()

    def _signature(self) -> Signature | None:
        """Change when the file does; None while it is away, as in the middle of being replaced."""
        if self._source.path is None:
            return None
        try:
            stat = os.stat(self._source.path)
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def convert_problems(problems: list[Problem]) -> list[ConfigFinding]:
    """Problems of a configuration as the live page shows them."""
    return [ConfigFinding(one.severity, one.path, one.message, one.hint) for one in problems]
