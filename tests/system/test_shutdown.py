"""SIGTERM: nothing new is taken, everything running finishes, and the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, event, start_stream
from tests.support.process import kvproxy_serve
from tests.support.proxy import chat
from tests.support.until import until

pytestmark = pytest.mark.slow


async def test_a_hundred_streams_finish_after_sigterm() -> None:
    """They began before the signal, so they end with [DONE]; the exit status is 0."""
    go_on = asyncio.Event()

    async def half_then_rest(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b'{"n":1}')
        await go_on.wait()
        await event(send, b'{"n":2}')
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    engine = FakeEngine("a", half_then_rest)
    started = 0

    async def read_one(client: httpx.AsyncClient) -> str:
        nonlocal started
        text = ""
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            async for piece in answer.aiter_text():
                started += not text
                text += piece
        return text

    async with serve(engine) as url, kvproxy_serve("--endpoint", f"a={url}", "--port", "0", "--no-admin") as kvproxy:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=kvproxy.url, timeout=60, limits=limits) as client:
            reading = [asyncio.create_task(read_one(client)) for _ in range(100)]
            await until(lambda: started == 100, within_s=60)
            kvproxy.terminate()
            await until(lambda: any("no new requests" in line for line in kvproxy.lines))
            go_on.set()
            texts = await asyncio.gather(*reading)
        assert await asyncio.wait_for(kvproxy.process.wait(), 60) == 0
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)


async def test_a_second_signal_ends_the_drain() -> None:
    """An operator in a hurry does not wait for a stream that never ends."""

    async def endless(engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b"{}")
        await call.gone.wait()

    engine = FakeEngine("a", endless)
    async with serve(engine) as url, kvproxy_serve("--endpoint", f"a={url}", "--port", "0", "--no-admin") as kvproxy:
        async with (
            httpx.AsyncClient(base_url=kvproxy.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=chat(stream=True)),
        ):
            kvproxy.terminate()
            await until(lambda: any("no new requests" in line for line in kvproxy.lines))
            kvproxy.terminate()
            assert await asyncio.wait_for(kvproxy.process.wait(), 60) == 0
        await asyncio.wait_for(engine.calls[0].gone.wait(), 60)


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take a connection, and send nothing on it."""
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("store", ["", "silent", "closed"])
async def test_a_taken_port_is_a_clear_error(tmp_path: Path, store: str) -> None:
    """What, where, and exit status 1; no traceback. A library that connects to a store meanwhile and swallows its
    cancellation does not keep the process."""
    server = await asyncio.start_server(_silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sync: dict[str, Any] = {
        "": {},
        "silent": {"redis": f"redis://127.0.0.1:{port}"},
        "closed": {"redis": "redis://127.0.0.1:1"},
    }
    config = {"endpoints": {"a": "http://127.0.0.1:9"}, "listen": f"127.0.0.1:{port}", "admin": {"enabled": False}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "sync": sync[store]}))
    process = await asyncio.create_subprocess_exec(
        *_python(), "serve", "-c", str(tmp_path / "config.json"), stderr=asyncio.subprocess.PIPE
    )
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
    finally:
        server.close()
        if process.returncode is None:
            process.kill()
    text = stderr.decode()
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in text
    assert "Traceback" not in text


def _python() -> tuple[str, ...]:
    import sys

    return sys.executable, "-m", "kvproxy"


async def test_the_last_requests_are_in_the_access_log(tmp_path: Path) -> None:
    """Lines are gathered for a moment; the end of the process loses none of them."""
    file = tmp_path / "config.yaml"
    async with serve(FakeEngine("a")) as url:
        file.write_text(f"endpoints: {{a: '{url}'}}\nlisten: ':0'\nadmin: {{enabled: false}}\n")
        async with kvproxy_serve("-c", str(file)) as kvproxy, httpx.AsyncClient(base_url=kvproxy.url) as client:
            for _ in range(20):
                assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
            kvproxy.terminate()
    lines = [line for line in kvproxy.lines if "POST /v1/chat/completions 200" in line]
    assert len(lines) == 20


async def test_a_blocked_event_loop_does_not_outlive_the_signal(tmp_path: Path) -> None:
    """A filter that hangs in a call which never returns: after drain and grace the process ends, and says so."""
    (tmp_path / "hanging.py").write_text(HANGING)
    process = await asyncio.create_subprocess_exec(
        _python()[0], "hanging.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            assert await process.stdout.readline() == b"hangs\n"
            process.terminate()
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 1
    assert b"the process ends now although these still run" in stderr


#: The event loop opens a pipe that nothing writes to; a task swallows what ends it, and so does a thread.
HANGING = """
import asyncio, os, threading
from kvproxy.operate.commands.last_resort import LastResort
from kvproxy.operate.commands.serving import ProcessSignals, run_bounded, run_loop

async def main(last_resort):
    signals = ProcessSignals(0.0, last_resort, grace_s=0.1)
    signals.install(lambda: None)
    os.mkfifo("pipe")
    asyncio.get_running_loop().run_in_executor(None, open, "pipe")
    print("hangs", flush=True)
    open("pipe")

with LastResort() as last_resort:
    run_loop(lambda: run_bounded(main(last_resort), last_resort))
"""


async def test_threads_of_libraries_do_not_keep_the_process(tmp_path: Path) -> None:
    """The default pool's threads are joined at the end: one in a dead mount never returns. The exit status is that of
    the work."""
    script = HANGING.replace('    open("pipe")\n', "    return 5\n")
    process = await asyncio.create_subprocess_exec(
        _python()[0], "-c", script, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await asyncio.wait_for(process.wait(), 120) == 5
