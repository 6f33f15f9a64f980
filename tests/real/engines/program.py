"""One program that serves HTTP: started in a session of its own, awaited, ended by its process id."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

_GRACE_S = 15.0

#: Ends a program's whole session when the process that started it is gone: its standard input then ends.
_GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


class Program:
    """A context manager: inside it the program runs; afterwards nothing of it is left, whatever happened.

    Nothing is left either when the test run itself is killed. `ready` is the URL that answers 200 once it serves;
    output goes to `log`. `tls`: by which it is asked over https.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        ready: str,
        log: Path,
        environment: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.name = name
        self.ready = ready
        self._tls = tls
        self._command = [str(part) for part in command]
        self._log = log
        self._environment = {**os.environ, **environment}
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running program."""
        assert self._child is not None
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it and return at once; the rest of an earlier run is ended first."""
        self.end()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        guard = [sys.executable, "-c", _GUARD, str(self._child.pid)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def await_ready(self, *, within_s: float) -> None:
        """Return once it serves; AssertionError with the end of its log when it does not."""
        end = time.monotonic() + within_s
        while time.monotonic() < end and self.running:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.ready, timeout=5, verify=self._tls or True).status_code == 200:
                    return
            time.sleep(0.25)  # another program, asked outside of any event loop: nothing to be told by
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise AssertionError(f"{self.name} does not serve {self.ready}; the end of {self._log}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL to the program itself; children it has are left to notice."""
        assert self._child is not None
        self._child.kill()
        self._child.wait()

    def end(self) -> None:
        """SIGTERM, some grace, then SIGKILL to what is left of its session."""
        if self._child is None:
            return
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child = None
        assert self._guard is not None
        with self._guard:  # closes its standard input and waits for it
            self._guard.kill()
        self._guard = None

    def __enter__(self) -> Program:
        self._log.unlink(missing_ok=True)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()


def flags(values: Mapping[str, object]) -> list[str]:
    """Return a command line's options with their values."""
    return [str(part) for pair in values.items() for part in pair]
