"""A visit to everything a configuration names: the whole one of `kvproxy doctor`, and the light one of `serve`."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.config.schema import Config
from kvproxy.doctor.check import run_checks
from kvproxy.doctor.checks.configuration import configuration_findings
from kvproxy.doctor.plan import full, light, timed
from kvproxy.doctor.report import Report
from kvproxy.doctor.site import survey
from kvproxy.doctor.tools import Tools
from kvproxy.errors import Problem


async def diagnose(
    config: Config | None, problems: Sequence[Problem] = (), *, tools: Tools, open_files: int | None = None
) -> Report:
    """Everything found. `config` is None when `problems` (those of `kvproxy check`) leave nothing to visit.

    Sends every engine two requests of one token each, at most three. `open_files` is this process's limit; None: asked
    of the system.
    """
    if config is None:
        return Report.of(configuration_findings(problems))
    async with tools:
        site = await survey(config, tools=tools, open_files=open_files)
        timeout_s = tools.patience.exchange_s
        visited = await run_checks(full(site, problems), timeout_s=timeout_s)
        return visited.joined(await run_checks(timed(site), timeout_s=timeout_s))


async def startup_findings(config: Config, *, tools: Tools, open_files: int | None = None) -> Report:
    """What can be found without generating anything: reachability, models, event sources, instance ids."""
    async with tools:
        site = await survey(config, tools=tools, open_files=open_files)
        return await run_checks(light(site), timeout_s=tools.patience.exchange_s)
