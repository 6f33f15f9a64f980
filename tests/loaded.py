"""`make test-loaded`: the suite three times running, on a machine whose cores are kept busy by four other processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

BUSY_PROCESSES = 4
RUNS = 3

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


def main(arguments: list[str]) -> int:
    """The first exit status that is not 0, or 0."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with busy(BUSY_PROCESSES):
        for run in range(RUNS):
            sys.stderr.write(f"run {run + 1} of {RUNS}, beside {BUSY_PROCESSES} busy processes\n")
            status = _suite(arguments)
            if status:
                return status
    return 0


def _suite(arguments: list[str]) -> int:
    suite = subprocess.Popen([sys.executable, "-m", "pytest", "-n", "2", *arguments])
    try:
        return suite.wait()
    finally:
        if suite.poll() is None:
            suite.terminate()
            suite.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
