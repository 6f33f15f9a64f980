"""Advice for the live page: `kvproxy doctor --advise` in a process of its own, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Self

from kvproxy.base.background_task import TaskSet

log = logging.getLogger(__name__)

#: For engines and receipts, besides the budget of simulations.
_OTHER_S = 120.0
_MAX_BYTES = 4 << 20


def advise_command(path: str, budget_s: float, *, lenient: bool = False) -> Sequence[str]:
    """Return what is run; it makes itself nice."""
    command = [sys.executable, "-m", "kvproxy", "doctor", "--advise", "--json", "-c", path]
    return [*command, "--advise-budget", f"{budget_s:g}s", *(["--lenient"] if lenient else [])]


class AdviceRunner:
    """An async context manager; leaving it ends what still runs. `command` makes the command line of a budget."""

    def __init__(
        self,
        command: Callable[[float], Sequence[str]],
        *,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._command = command
        self._wall_clock = wall_clock
        self._tasks = TaskSet()
        self._state = "none"
        self._started: datetime | None = None
        self._error = ""
        self._advice: Any = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.__aexit__(None, None, None)

    def start_run(self, budget_s: float) -> bool:
        """Start a run unless one is running; return True if it started."""
        if self._state == "running":
            return False
        self._state, self._started, self._error = "running", self._wall_clock(), ""
        self._tasks.start(self._run(budget_s), name="advice")
        return True

    def describe_run(self) -> dict[str, Any]:
        """`state` is none, running, done or failed (`error` shows why); `advice` is the latest there was."""
        started = None if self._started is None else self._started.isoformat(timespec="seconds")
        return {"state": self._state, "started": started, "error": self._error, "advice": self._advice}

    async def _run(self, budget_s: float) -> None:
        try:
            async with asyncio.timeout(budget_s + _OTHER_S):
                output = await _output_of(self._command(budget_s))
            self._advice = await asyncio.to_thread(json.loads, output)
            self._state = "done"
        except TimeoutError:
            self._state = "failed"
            self._error = "it took too long"
        except (OSError, ValueError) as error:
            self._state = "failed"
            self._error = str(error)
        except Exception as error:
            log.exception("a run of the adviser is broken")
            self._state = "failed"
            self._error = type(error).__name__


async def _output_of(command: Sequence[str]) -> bytes:
    """Its standard output; ValueError with the end of the other where it failed. It does not outlive the caller."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.TaskGroup() as group:
            output, said = (group.create_task(_read(stream)) for stream in (process.stdout, process.stderr))
        if await process.wait():
            raise ValueError(said.result().decode("utf-8", "replace").strip()[-500:] or "the command failed")
        return output.result()
    except ExceptionGroup as error:
        raise ValueError("its output was too long") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.communicate()  # its pipes are closed once they are read


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end; ValueError if that is beyond the bound."""
    assert stream is not None
    try:
        await stream.readexactly(_MAX_BYTES + 1)
    except asyncio.IncompleteReadError as ended:
        return ended.partial
    raise ValueError
