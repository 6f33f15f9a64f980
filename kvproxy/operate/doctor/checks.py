"""A visit to everything a configuration names: which checks there are, and running them.

Checks run at the same time, each within its own deadline, and none of them raises. `kvproxy doctor` makes the whole
visit; `kvproxy serve` makes a light one when it starts, beside the traffic, and logs its findings once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.errors import ClientError, Problem
from kvproxy.base.installed import installed
from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.check_agent_prompts import check_agent_prompts
from kvproxy.operate.doctor.check_configuration import (
    check_certificates,
    check_configuration,
    check_open_files,
    check_public_paths,
    convert_problems,
)
from kvproxy.operate.doctor.check_engine_setup import check_cors, check_ranks, check_sglang
from kvproxy.operate.doctor.check_models import (
    check_duplicates,
    check_models,
    check_tokenizer,
    check_tokenizers,
    check_versions,
)
from kvproxy.operate.doctor.check_reachability import check_api, check_connection, check_health, check_metrics
from kvproxy.operate.doctor.check_trial import (
    check_caching,
    check_clock,
    check_generating,
    check_priority,
    check_tokenize,
    priority_mode,
)
from kvproxy.operate.doctor.deployment import Deployment, survey_deployment
from kvproxy.operate.doctor.report import Check, DoctorReport, Finding, Severity, SkippedCheck, warning
from kvproxy.operate.doctor.tools import Tools
from kvproxy.operate.feature import Feature

log = logging.getLogger("kvproxy.doctor")


async def run_checks(checks: Iterable[Check], *, timeout_s: float) -> DoctorReport:
    """Run all of them; `timeout_s` is for one exchange."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_run(check, timeout_s), name=f"doctor check {check.name} {check.where}")
            for check in checks
        ]
    results = [task.result() for task in tasks]
    skipped = [one for one in results if isinstance(one, SkippedCheck)]
    return DoctorReport.of_findings(
        [finding for one in results if not isinstance(one, SkippedCheck) for finding in one], skipped
    )


async def _run(check: Check, timeout_s: float) -> Sequence[Finding] | SkippedCheck:
    deadline_s = check.calls * timeout_s
    try:
        async with asyncio.timeout(deadline_s):
            found = await check.collect()
    except TimeoutError:
        found = [warning(check.where, f"not known after {deadline_s:g} s", "the service is slow: raise --timeout")]
    except ClientError as error:
        return SkippedCheck(check.name, check.where, str(error).removeprefix(f"{check.where} "))
    except Exception as error:
        log.exception("the check %s of %s is broken", check.name, check.where)
        found = [warning(check.where, f"the check itself failed: {type(error).__name__}", "please report it")]
    return [replace(one, check=check.name) for one in found]


def list_full_checks(deployment: Deployment, problems: Sequence[Problem]) -> list[Check]:
    """Return all checks, with two requests of one token to each engine (one more if its KV events were silent, and if
    it gets a priority)."""
    own = _of_features(deployment, trial=True)
    return [*_quiet(deployment, problems, trial=True), *_trials(deployment), *own]


def list_light_checks(deployment: Deployment, problems: Sequence[Problem] = ()) -> list[Check]:
    """Return what can be asked without generating anything."""
    return [*_quiet(deployment, problems, trial=False), *_of_features(deployment, trial=False)]


def _of_features(deployment: Deployment, *, trial: bool) -> Iterator[Check]:
    for feature in installed(Feature):
        yield from feature.list_checks(deployment, trial=trial)


def _quiet(deployment: Deployment, problems: Sequence[Problem], *, trial: bool) -> Iterator[Check]:
    wall_clock = deployment.tools.wall_clock
    yield check_configuration(problems, deployment.undiscovered)
    yield check_open_files(deployment)
    yield check_certificates(deployment.config, wall_clock)
    yield check_public_paths(deployment.config)
    for engine in (*deployment.engines, *filter(None, [deployment.tokenizer])):
        yield check_connection(engine.where, engine.origin, engine.link.try_link, wall_clock)
        yield check_api(engine)
    for engine in deployment.engines:
        yield check_health(engine)
        yield check_metrics(engine)
        yield check_sglang(engine, deployment.config.clusters[engine.cluster])
        yield check_clock(engine, trial=trial)
        if not any(spec.name == "cors" for spec in deployment.config.filters):
            yield check_cors(engine)
    for cluster in deployment.clusters:
        yield check_models(cluster)
        yield check_versions(cluster)


def _trials(deployment: Deployment) -> Iterator[Check]:
    for engine in deployment.engines:
        yield check_generating(engine)
        yield check_tokenize(engine, elsewhere=deployment.tokenizer is not None)
        yield check_agent_prompts(engine, deployment.tokenizer or engine)
        yield check_caching(engine)
        yield check_ranks(engine)
        if (mode := priority_mode(deployment, engine)) is not EnginePriorityMode.OFF:
            yield check_priority(engine, mode)
    for cluster in deployment.clusters:
        yield check_tokenizers(cluster)
    if deployment.tokenizer is not None:
        yield check_tokenizer(deployment.tokenizer)
    yield check_duplicates(deployment)


async def diagnose_setup(
    config: Config | None, problems: Sequence[Problem] = (), *, tools: Tools, open_files: int | None = None
) -> DoctorReport:
    """Everything found. `config` is None when `problems` (those of `kvproxy check`) leave nothing to visit.

    Sends every engine two requests of one token each, at most four. `open_files` is this process's limit; None: asked
    of the system.
    """
    if config is None:
        return DoctorReport.of_findings(convert_problems(problems))
    async with tools:
        deployment = await survey_deployment(config, tools=tools, open_files=open_files)
        timeout_s = tools.timeouts.exchange_s
        checks = list_full_checks(deployment, problems)
        visited = await run_checks([one for one in checks if not one.alone], timeout_s=timeout_s)
        return visited.merge_report(await run_checks([one for one in checks if one.alone], timeout_s=timeout_s))


async def diagnose_lightly(config: Config, *, tools: Tools, open_files: int | None = None) -> DoctorReport:
    """Return what can be found without generating anything: reachability, models, event sources, instance ids."""
    async with tools:
        deployment = await survey_deployment(config, tools=tools, open_files=open_files)
        return await run_checks(list_light_checks(deployment), timeout_s=tools.timeouts.exchange_s)


class StartupDiagnosis(BackgroundTask):
    """An async context manager: inside it a task visits once. `report` is what it found, None until then;
    `on_report` is called with it."""

    task_name = "startup visit"

    def __init__(
        self,
        config: Config,
        *,
        tools: Tools | None = None,
        on_report: Callable[[DoctorReport], None] = lambda report: None,
    ) -> None:
        self.report: DoctorReport | None = None
        self._on_report = on_report
        self._config = config
        self._tools = tools

    async def _run(self) -> None:
        try:
            self.report = await diagnose_lightly(self._config, tools=self._tools or Tools())
        except Exception:
            log.exception("the visit to the engines failed; the proxy is not affected")
            return
        self._on_report(self.report)
        for one in self.report.findings:
            level = logging.WARNING if one.severity is Severity.PROBLEM else logging.INFO
            fix = f"; fix: {one.fix}" if one.fix else ""
            log.log(level, "[doctor] %s: %s: %s%s", one.check, one.where, one.what, fix)
