"""`make test-loaded`: fast and slow tests three times running, on a machine kept busy by four other processes.

Now and then one of its workers stands still for seconds, as all of a machine does that others use, too.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil

BUSY_PROCESSES = 4
RUNS = 3
#: Seconds between pauses, and that one takes.
BETWEEN_S, PAUSE_S = (1.0, 8.0), (0.5, 4.0)

#: Ends by itself when its parent is gone, however that ended.
_BURN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(1_000_000))
"""


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute for nothing."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        while len(processes) < count:
            processes.append(subprocess.Popen([sys.executable, "-c", _BURN, str(os.getpid())]))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def pause_child(parent: int, rng: random.Random, wait: Callable[[], object]) -> bool:
    """One of its children does nothing until `wait` returns; whether there was one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(parent).children()
        if children:
            paused = rng.choice(children)
            paused.suspend()
            try:
                wait()
            finally:
                paused.resume()
            return True
    return False


def main(arguments: list[str]) -> int:
    """Return the first exit status that is not 0, or 0."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with busy(BUSY_PROCESSES):
        for run in range(RUNS):
            sys.stderr.write(f"run {run + 1} of {RUNS}, beside {BUSY_PROCESSES} busy processes\n")
            status = _suite(arguments, random.Random(run))
            if status:
                return status
    return 0


def _suite(arguments: list[str], rng: random.Random) -> int:
    suite, pauses = subprocess.Popen([sys.executable, "-m", "pytest", "-n", "2", *arguments]), 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = suite.wait(timeout=rng.uniform(*BETWEEN_S))
                sys.stderr.write(f"a worker stood still {pauses} times\n")
                return status
            pauses += pause_child(suite.pid, rng, partial(time.sleep, rng.uniform(*PAUSE_S)))
    finally:
        if suite.poll() is None:
            suite.terminate()
            suite.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
