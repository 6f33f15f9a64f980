"""The load beside which the suite is run leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

from tests.loaded import busy
from tests.support.until import until


class Failed(Exception):
    """Of the run beside the load."""


def test_the_busy_processes_end_with_the_run() -> None:
    """Also when the run fails."""
    try:
        with busy(2) as processes:
            assert [process.poll() for process in processes] == [None, None]
            raise Failed
    except Failed:
        assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


async def test_they_end_when_the_run_is_killed() -> None:
    """No process is left to end them then."""
    script = """
import signal
from tests.loaded import busy
with busy(1) as (one,):
    print(one.pid, flush=True)
    signal.pause()
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    """Whether it is there and no mere entry of the process table."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")
