"""Checks, and running them: at the same time, each within its own deadline, none of them raising."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvproxy.doctor.finding import Finding, warning
from kvproxy.doctor.report import Report, Skipped
from kvproxy.errors import ClientError

log = logging.getLogger(__name__)


class Check(Protocol):
    """One question. `calls` is how many exchanges it waits for, one after another, at most: its deadline."""

    @property
    def name(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def where(self) -> str:
        """What it looks at."""
        ...

    async def find(self) -> Sequence[Finding]:
        """What it found, good findings included.

        A ClientError means that it could not look; the check that owns the failed exchange says what is wrong.
        """
        ...


async def run_checks(checks: Iterable[Check], *, timeout_s: float) -> Report:
    """Runs all of them; `timeout_s` is for one exchange."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_run(check, timeout_s), name=f"doctor check {check.name} {check.where}")
            for check in checks
        ]
    results = [task.result() for task in tasks]
    skipped = [one for one in results if isinstance(one, Skipped)]
    return Report.of([finding for one in results if not isinstance(one, Skipped) for finding in one], skipped)


async def _run(check: Check, timeout_s: float) -> Sequence[Finding] | Skipped:
    deadline_s = check.calls * timeout_s
    try:
        async with asyncio.timeout(deadline_s):
            found = await check.find()
    except TimeoutError:
        found = [warning(check.where, f"not known after {deadline_s:g} s", "the service is slow: raise --timeout")]
    except ClientError as error:
        return Skipped(check.name, check.where, str(error).removeprefix(f"{check.where} "))
    except Exception as error:
        log.exception("the check %s of %s is broken", check.name, check.where)
        found = [warning(check.where, f"the check itself failed: {type(error).__name__}", "please report it")]
    return [replace(one, check=check.name) for one in found]
