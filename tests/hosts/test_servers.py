"""`kvproxy.Proxy` as an ASGI app under other servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from kvproxy.testing import simulated_engines
from tests.docs.world import free_port
from tests.support.until import until_says

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
CHAT = "/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
SERVERS = {
    "uvicorn": ["uvicorn", "app:proxy", "--port", "PORT"],
    "uvicorn without lifespan": ["uvicorn", "app:proxy", "--port", "PORT", "--lifespan", "off"],
    "uvicorn below a root": ["uvicorn", "app:proxy", "--port", "PORT", "--root-path", "/llm"],
    "hypercorn": ["hypercorn", "app:proxy", "--bind", "127.0.0.1:PORT"],
    "granian": ["granian", "app:proxy", "--interface", "asgi", "--port", "PORT"],
    "daphne": ["daphne", "-p", "PORT", "app:proxy"],
}


@contextmanager
def served(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the server's process, in a group of its own."""
    log = (folder / "log").open("wb")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    program = str(Path(sys.executable).parent / command[0])
    process = subprocess.Popen(
        [program, *command[1:]], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


@pytest.mark.parametrize("name", SERVERS)
async def test_a_stream_comes_through(name: str, tmp_path: Path) -> None:
    async with simulated_engines(2) as endpoints:
        (tmp_path / "app.py").write_text(f"import kvproxy\nproxy = kvproxy.Proxy({{'endpoints': {endpoints!r}}})\n")
        port = str(free_port())
        command = [part.replace("PORT", port) for part in SERVERS[name]]
        with served(command, tmp_path) as process:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

                async def ask() -> tuple[int, str]:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    try:
                        answer = await client.post(CHAT, json=BODY)
                    except httpx.ConnectError:
                        return 0, ""
                    return answer.status_code, answer.text[-14:]

                await until_says((200, "data: [DONE]\n\n"), ask)


async def test_a_start_that_fails_ends_the_server_with_its_message(tmp_path: Path) -> None:
    """Not a server that answers unstarted."""
    config = "{'endpoints': {'a': 'http://127.0.0.1:9'}, 'receipts': {'path': '/proc/nope/x'}}"
    (tmp_path / "app.py").write_text(f"import kvproxy\nproxy = kvproxy.Proxy({config})\n")
    with served(["uvicorn", "app:proxy", "--port", str(free_port())], tmp_path) as process:
        assert await asyncio.to_thread(process.wait, 60) != 0
    assert "kvproxy cannot start" in (tmp_path / "log").read_text()
