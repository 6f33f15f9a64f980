"""`kvproxy` as a process of its own, as an operator runs it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

_LISTENING = re.compile(r"kvproxy \S+ on (http\S+)")


@dataclass
class KvproxyProcess:
    """A running `kvproxy serve`."""

    process: asyncio.subprocess.Process
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


@contextlib.asynccontextmanager
async def kvproxy_serve(*arguments: str, checkout: Path | None = None) -> AsyncIterator[KvproxyProcess]:
    """Start `kvproxy serve` with these arguments, waits until it listens, and ends it if it still runs. `checkout`: the
    kvproxy of another folder."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvproxy", "serve", *arguments, stderr=asyncio.subprocess.PIPE, cwd=checkout
    )
    assert process.stderr is not None
    running = KvproxyProcess(process)
    reader: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(120):
            while not running.url:
                line = (await process.stderr.readline()).decode()
                if not line:
                    raise AssertionError("kvproxy ended: " + "".join(running.lines))
                running.lines.append(line)
                if found := _LISTENING.search(line):
                    running.url = found[1]
        reader = asyncio.create_task(_keep_reading(running, process.stderr), name="read stderr")
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 60)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        if reader is not None:
            await reader


async def _keep_reading(running: KvproxyProcess, stderr: asyncio.StreamReader) -> None:
    while line := await stderr.readline():
        running.lines.append(line.decode())
