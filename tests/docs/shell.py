"""Runs the commands of a block as a reader would: line by line, with what serves left running beside the rest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

#: Commands that go on until Ctrl-C, with what they show once they work.
SERVING = {
    "kvproxy serve": r"kvproxy \S+ on http",
    "kvproxy status --watch": r"ENDPOINT +STATE",
    "uvicorn": r"Uvicorn running",
}
LIMIT_S = 60.0


def commands(text: str) -> Iterator[str]:
    """Command by command, continued lines joined, comments left out."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        command = re.sub(r"\s+#\s.*$", "", line).strip()
        if command:
            yield command


class Shell:
    """A folder and an environment; the serving commands it started end with it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def run(self, command: str) -> str:
        """Run a command and return its output. AssertionError when it fails, or when a server does not begin to
        serve."""
        serving = re.sub(r"^(?:\w+=\S+ )+", "", command)
        for beginning, shows in SERVING.items():
            if serving.startswith(beginning):
                return await self._stack.enter_async_context(self._serving(command, shows))
        process = await self._started(f"set -euo pipefail; {command}")
        out = await self._rest_of(process)
        assert process.returncode == 0, f"{command}: {process.returncode}\n{out.decode()}"
        return out.decode()

    @contextlib.asynccontextmanager
    async def _serving(self, command: str, shows: str) -> AsyncIterator[str]:
        process = await self._started(re.sub(r"^((?:\w+=\S+ )*)", r"\1exec ", command))
        assert process.stdout is not None
        text = ""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not re.search(shows, text):
                    line = await process.stdout.readline()
                    assert line, f"{command} ended:\n{text}"
                    text += line.decode()
            yield text
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            rest = await self._rest_of(process)
        assert process.returncode == 0, f"{command}: {process.returncode}\n{text}{rest.decode()}"

    @staticmethod
    async def _rest_of(process: asyncio.subprocess.Process) -> bytes:
        """Read the rest of the output until the end. A process that does not end is killed, with all that it
        started."""
        try:
            return (await asyncio.wait_for(process.communicate(), LIMIT_S))[0]
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _started(self, command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=self._folder, env=dict(self._environment), start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
