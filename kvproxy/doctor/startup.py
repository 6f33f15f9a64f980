"""The light visit when the proxy starts: beside the traffic, its findings logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvproxy.background_task import BackgroundTask
from kvproxy.config.schema import Config
from kvproxy.doctor.finding import Severity
from kvproxy.doctor.report import Report
from kvproxy.doctor.tools import Tools
from kvproxy.doctor.visit import startup_findings

log = logging.getLogger("kvproxy.doctor")


class StartupVisit(BackgroundTask):
    """An async context manager: inside it a task visits once. `report` is what it found, None until then;
    `on_report` is told of it."""

    task_name = "startup visit"

    def __init__(
        self, config: Config, *, tools: Tools | None = None, on_report: Callable[[Report], None] = lambda report: None
    ) -> None:
        self.report: Report | None = None
        self._on_report = on_report
        self._config = config
        self._tools = tools

    async def finished(self) -> Report:
        """Waits for the report."""
        assert self._task is not None, "not entered"
        await asyncio.wait([self._task])
        assert self.report is not None, "the visit did not end well"
        return self.report

    async def _run(self) -> None:
        try:
            self.report = await startup_findings(self._config, tools=self._tools or Tools())
        except Exception:
            log.exception("the visit to the engines is broken; the proxy works on")
            return
        self._on_report(self.report)
        for one in self.report.findings:
            level = logging.WARNING if one.severity is Severity.PROBLEM else logging.INFO
            fix = f"; fix: {one.fix}" if one.fix else ""
            log.log(level, "[doctor] %s: %s: %s%s", one.check, one.where, one.what, fix)
