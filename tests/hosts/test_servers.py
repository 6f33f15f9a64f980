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
from tests.support.ports import free_port
from tests.support.until import until_says

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
CHAT = "/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "hello " * 400}], "max_tokens": 4, "stream": True}
UVICORN = ["uvicorn", "app:app", "--port", "PORT"]
HYPERCORN = ["hypercorn", "app:app", "--bind", "127.0.0.1:PORT"]
GRANIAN = ["granian", "app:app", "--port", "PORT"]
GUNICORN = ["gunicorn", "app:app", "--bind", "127.0.0.1:PORT", "--worker-class", "uvicorn.workers.UvicornWorker"]
SERVERS = {
    "uvicorn, h11": [*UVICORN, "--http", "h11", "--loop", "asyncio"],
    "uvicorn, httptools and uvloop": [*UVICORN, "--http", "httptools", "--loop", "uvloop"],
    "uvicorn, 2 workers": [*UVICORN, "--workers", "2"],
    "uvicorn, reload": [*UVICORN, "--reload"],
    "uvicorn, without lifespan": [*UVICORN, "--lifespan", "off"],
    "uvicorn, below a root": [*UVICORN, "--root-path", "/llm"],
    "uvicorn, a limit of requests": [*UVICORN, "--limit-max-requests", "1000"],
    "hypercorn, asyncio": HYPERCORN,
    "hypercorn, uvloop": [*HYPERCORN, "-k", "uvloop"],
    "hypercorn, h2c": HYPERCORN,
    "hypercorn, trio": ["hypercorn", "app:gateway", "--bind", "127.0.0.1:PORT", "-k", "trio"],
    "granian, asgi": [*GRANIAN, "--interface", "asgi"],
    "granian, asginl": [*GRANIAN, "--interface", "asginl"],
    "granian, below a prefix": [*GRANIAN, "--interface", "asgi", "--url-path-prefix", "/llm"],
    "daphne": ["daphne", "-p", "PORT", "app:app"],
    "gunicorn": GUNICORN,
    "gunicorn, preload": [*GUNICORN, "--preload"],
}
#: `app` is a proxy behind the middleware, and at /gateway an app that answers with what is preferred.
APP = """
import json
import kvproxy

ENDPOINTS = ENGINES
proxy = kvproxy.Proxy({"endpoints": ENDPOINTS})


async def note(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    found = kvproxy.preferred(scope)
    kvproxy.served(scope, "sim-1")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(found).encode()})


async def both(scope, receive, send):
    gateway = scope["type"] == "http" and "/gateway/" in scope["path"]
    await (note if gateway else proxy)(scope, receive, send)


app = kvproxy.KVCacheMiddleware(both, endpoints=ENDPOINTS)
gateway = kvproxy.KVCacheMiddleware(note, endpoints=ENDPOINTS)
"""


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVERS)
async def test_the_second_turn_is_known_and_a_stream_comes_through(name: str, tmp_path: Path) -> None:
    """Under trio, where nothing of ours runs, requests pass."""
    prefix = "/llm" if name == "granian, below a prefix" else ""
    async with simulated_engines(2) as endpoints:
        (tmp_path / "app.py").write_text(APP.replace("ENGINES", repr(endpoints)))
        port = str(free_port())
        command = [part.replace("PORT", port) for part in SERVERS[name]]
        h2c = name == "hypercorn, h2c"
        url = f"http://127.0.0.1:{port}{prefix}"
        with served(command, tmp_path) as process:
            async with httpx.AsyncClient(base_url=url, timeout=30, http1=not h2c, http2=h2c) as client:

                async def ask(path: str) -> tuple[int, str]:
                    assert process.poll() is None
                    try:
                        answer = await client.post(path, json=BODY)
                    except httpx.TransportError:
                        return 0, ""
                    return answer.status_code, answer.text[-14:]

                trio = "trio" in name
                await until_says((200, "null" if trio else '"sim-1"'), lambda: ask("/gateway" + CHAT), within_s=200)
                if not trio:
                    await until_says((200, "data: [DONE]\n\n"), lambda: ask(CHAT))


async def test_a_start_that_fails_ends_the_server_with_its_message(tmp_path: Path) -> None:
    """Not a server that answers unstarted."""
    config = "{'endpoints': {'a': 'http://127.0.0.1:9'}, 'receipts': {'path': '/proc/nope/x'}}"
    (tmp_path / "app.py").write_text(f"import kvproxy\nproxy = kvproxy.Proxy({config})\n")
    with served(["uvicorn", "app:proxy", "--port", str(free_port())], tmp_path) as process:
        assert await asyncio.to_thread(process.wait, 60) != 0
    assert "kvproxy cannot start" in (tmp_path / "log").read_text()
