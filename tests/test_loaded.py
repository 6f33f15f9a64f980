"""The load beside which the suite is run leaves nothing behind, and no worker still."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading

from tests.loaded import busy, pause_child
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


async def test_a_worker_that_stood_still_goes_on() -> None:
    """It is stopped, and then not."""
    script = "import os\nprint(os.getpid(), flush=True)\ninput()"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    seen = threading.Event()
    pausing = asyncio.create_task(asyncio.to_thread(pause_child, parent.pid, random.Random(1), seen.wait))
    try:
        await until(lambda: _state(pid).startswith("T"))
    finally:
        seen.set()
    assert await pausing
    await until(lambda: not _state(pid).startswith("T"))
    await parent.communicate(b"\n")
    await until(lambda: not _runs(pid))


def test_a_run_without_workers_is_not_paused() -> None:
    """None has begun yet, or the run is over."""
    assert not pause_child(_over(), random.Random(1), threading.Event().wait)


def _over() -> int:
    """Return a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def _state(pid: int) -> str:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout


def _runs(pid: int) -> bool:
    """Whether it is there and no mere entry of the process table."""
    state = _state(pid)
    return bool(state.strip()) and not state.startswith("Z")
