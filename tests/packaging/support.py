"""Running what was built as on another machine: another directory, another environment."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\npolicy: kv_aware\nendpoints: {a: %s}\n"


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 600) -> str:
    """Return standard output and error of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def virtual_environment(folder: Path) -> Path:
    """Return an empty one with pip; its Python."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


@asynccontextmanager
async def serving(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> AsyncIterator[str]:
    """Yield the URL of `kvproxy serve` as a process, ended by SIGTERM, which must succeed."""
    process = await asyncio.create_subprocess_exec(*command, cwd=cwd, env=dict(env), stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    text = ""
    try:
        async with asyncio.timeout(60):
            while not (found := re.search(r"kvproxy \S+ on (http\S+)", text)):
                line = (await process.stderr.readline()).decode()
                assert line, text
                text += line
        yield found[1]
    except BaseException:
        process.kill()
        raise
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0
