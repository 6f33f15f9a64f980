"""Processes under measurement: started, pinned, asked what they used, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil


class Process:
    """One program and its children, pinned to a core, or to a list of them such as `0-3`; ended with the block."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        core: int | str,
        log: Path,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._command = command
        self._core = core
        self._log = log
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Process:
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                ["taskset", "-c", str(self._core), *self._command],
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            os.killpg(self._child.pid, signal.SIGTERM)
            self._child.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()

    def cpu_s(self) -> float:
        """User and system time of the whole tree so far."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._tree()))

    def send_signal(self, number: signal.Signals) -> None:
        """To the program itself."""
        self._child.send_signal(number)

    def memory_mb(self) -> float:
        """Resident memory of the whole tree."""
        return sum(process.memory_info().rss for process in self._tree()) / 1e6

    def wait_until_ready(self, port: int, body: bytes, *, path: str, limit_s: float = 90.0) -> str:
        """ "" once a completion came back through it, else what is wrong."""
        end = time.monotonic() + limit_s
        problem = "never answered"
        while time.monotonic() < end:
            if self._child.poll() is not None:
                return f"ended with {self._child.returncode}: {self._log.read_text(errors='replace')[-300:]}"
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body)
            request.add_header("content-type", "application/json")
            try:
                with urllib.request.urlopen(request, timeout=5) as response:
                    if b'"chat.completion"' in response.read():
                        return ""
                    problem = "answered something else"
            except (OSError, urllib.error.URLError) as error:
                problem = str(error)
            time.sleep(0.3)
        return problem

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self._child.pid)
        return [root, *root.children(recursive=True)]
