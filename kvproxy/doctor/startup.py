"""The light visit when the proxy starts: beside the traffic, its findings logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvproxy.config.schema import Config
from kvproxy.doctor.finding import Severity
from kvproxy.doctor.report import Report
from kvproxy.doctor.tools import Tools
from kvproxy.doctor.visit import startup_findings

log = logging.getLogger("kvproxy.doctor")


class StartupVisit:
    """An async context manager: inside it a task visits once. `report` is what it found, None until then;
    `on_report` is told of it."""

    def __init__(
        self, config: Config, *, tools: Tools | None = None, on_report: Callable[[Report], None] = lambda report: None
    ) -> None:
        self.report: Report | None = None
        self._on_report = on_report
        self._config = config
        self._tools = tools
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._visit(), name="startup visit")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def finished(self) -> Report:
        """Waits for the report."""
        assert self._task is not None, "not entered"
        await asyncio.wait([self._task])
        assert self.report is not None, "the visit did not end well"
        return self.report

    async def _visit(self) -> None:
        try:
            self.report = await startup_findings(self._config, tools=self._tools or Tools())
        except Exception:
            log.exception("the visit to the engines is broken; the proxy works on")
            return
        self._on_report(self.report)
        for one in self.report.findings:
            level = logging.WARNING if one.severity is Severity.PROBLEM else logging.INFO
            log.log(level, "[doctor] %s: %s: %s; fix: %s", one.check, one.where, one.what, one.fix)
