"""`kvproxy serve --workers`: real processes behind one socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.types import Send

from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import Call, FakeEngine, event, start_stream
from tests.support.process import KvproxyProcess, kvproxy_serve
from tests.support.proxy import chat
from tests.support.until import until

pytestmark = pytest.mark.slow

_SERVES = re.compile(r"worker (\d) serves \(pid (\d+)\)")


def workers_of(kvproxy: KvproxyProcess) -> dict[int, int]:
    """Return the latest pid of each worker."""
    return {int(found[1]): int(found[2]) for line in kvproxy.lines if (found := _SERVES.search(line))}


def client_ports(pid: int, url: str) -> set[int]:
    """Of connections that this process has accepted."""
    port = httpx.URL(url).port
    found = psutil.Process(pid).net_connections("tcp4")
    return {one.raddr.port for one in found if one.status == "ESTABLISHED" and one.laddr.port == port}


@dataclass
class Streams:
    """Streams that began, by the port of the client's end; `texts` is what each had got at its end."""

    ports: dict[int, asyncio.Task[str]] = field(default_factory=dict)

    def of(self, ports: set[int]) -> list[asyncio.Task[str]]:
        """Those at these ports."""
        return [task for port, task in self.ports.items() if port in ports]

    async def begin(self, url: str) -> None:
        """One more, on a connection of its own; returns after its first event."""
        began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._read(url, began))
        self.ports[await began] = task

    async def _read(self, url: str, began: asyncio.Future[int]) -> str:
        text = ""
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
                    stream = answer.extensions["network_stream"]
                    async for piece in answer.aiter_text():
                        text += piece
                        if not began.done():
                            began.set_result(stream.get_extra_info("socket").getsockname()[1])
        return text


class HalfEngine(FakeEngine):
    """Sends half of each stream, and the rest once it may."""

    def __init__(self) -> None:
        super().__init__("a", self._half)
        self.go_on = asyncio.Event()

    async def _half(self, engine: FakeEngine, call: Call, send: Send) -> None:
        await start_stream(send)
        await event(send, b'{"n":1}')
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextlib.asynccontextmanager
async def two_workers(engine: FakeEngine) -> AsyncIterator[tuple[KvproxyProcess, Streams]]:
    """They serve, and each has some streams under way."""
    async with (
        serve(engine) as url,
        kvproxy_serve("--endpoint", f"a={url}", "--port", "0", "--no-admin", "--workers", "2") as kvproxy,
    ):
        streams = Streams()
        async with asyncio.timeout(60):
            while not all(client_ports(pid, kvproxy.url) for pid in workers_of(kvproxy).values()):
                await streams.begin(kvproxy.url)
        yield kvproxy, streams


async def test_a_worker_that_stands_still_is_replaced(tmp_path: Path) -> None:
    """Meanwhile the other serves; afterwards both do."""
    config = tmp_path / "c.yaml"
    async with serve(FakeEngine("a")) as url:
        config.write_text(f"endpoints: {{a: {url}}}\nworkers: 2\nworker_timeout: 2s\nadmin: {{enabled: false}}\n")
        async with kvproxy_serve("--config", str(config), "--port", "0") as kvproxy:
            pids = workers_of(kvproxy)
            os.kill(pids[0], signal.SIGSTOP)
            await until(lambda: any(f"worker 0 (pid {pids[0]}) hangs: it is killed" in line for line in kvproxy.lines))
            await until(lambda: workers_of(kvproxy)[0] != pids[0])
            assert not psutil.pid_exists(pids[0])


async def test_a_worker_that_hangs_before_it_serves_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in a filter of another distribution, which the log names."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "slow_filter.py").write_text(SLOW_FILTER)
    (info := tmp_path / "slow_filter-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-filter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvproxy.filters]\nslow = slow_filter:FILTER\n")
    (config := tmp_path / "c.yaml").write_text(
        "endpoints: [http://127.0.0.1:9]\nworkers: 2\nworker_start_timeout: 10s\nadmin: {enabled: false}\n"
        "filters: [inference_request, slow, kvcache, router]\n"
    )
    async with kvproxy_serve("--config", str(config), "--port", "0") as kvproxy:
        assert workers_of(kvproxy).keys() == {0, 1}
    log = "".join(kvproxy.lines)
    assert "does not come to serve: it is killed" in log
    assert 'slow_filter.py", line 11 in wait_for_ever' in log


SLOW_FILTER = """
import sys
import threading
from pathlib import Path

from kvproxy.base.settings.model import Model
from kvproxy.proxy.filters.chain import FilterType


def wait_for_ever():
    threading.Event().wait()


if "worker" in sys.argv:
    try:
        Path(__file__).with_name("first").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        wait_for_ever()

FILTER = FilterType(Model, lambda app, settings, context: app)
"""


def done(texts: Sequence[str]) -> bool:
    """Whether all of these streams are whole."""
    return bool(texts) and all(text.endswith("data: [DONE]\n\n") for text in texts)


async def test_a_killed_worker_takes_only_its_own_streams_along() -> None:
    """The others end whole, new requests are served, another process takes its place; SIGTERM then ends all, after
    their streams."""
    engine = HalfEngine()
    async with two_workers(engine) as (kvproxy, streams):
        pids = workers_of(kvproxy)
        lost, kept = (streams.of(client_ports(pids[index], kvproxy.url)) for index in (0, 1))
        os.kill(pids[0], signal.SIGKILL)
        assert not any(map(done, [[text] for text in await asyncio.gather(*lost)]))
        await until(lambda: workers_of(kvproxy)[0] != pids[0])
        while not streams.of(client_ports(workers_of(kvproxy)[0], kvproxy.url)):
            await streams.begin(kvproxy.url)
        kvproxy.terminate()
        await until(lambda: any("no new requests" in line for line in kvproxy.lines))
        engine.go_on.set()
        assert done(await asyncio.gather(*kept))
        assert done(await asyncio.gather(*(task for task in streams.ports.values() if task not in lost)))
        assert await asyncio.wait_for(kvproxy.process.wait(), 60) == 0
    assert not any(map(psutil.pid_exists, pids.values()))


async def test_workers_end_when_their_supervisor_is_killed() -> None:
    """Nothing can restart them or tell them anything: they finish what they have, and are no orphans. The
    folder of their sockets goes with them."""
    engine = HalfEngine()
    async with two_workers(engine) as (kvproxy, streams):
        pids = workers_of(kvproxy)
        [folder] = {Path(one.laddr).parent for one in psutil.Process(pids[0]).net_connections("unix") if one.laddr}
        assert folder.name.startswith("kvproxy-")
        kvproxy.process.kill()
        await until(lambda: sum("the supervisor is gone" in line for line in kvproxy.lines) == 2)
        engine.go_on.set()
        assert done(await asyncio.gather(*streams.ports.values()))
        await until(lambda: not any(map(psutil.pid_exists, pids.values())))
    await until(lambda: not folder.exists())  # another supervisor that starts may be the one that removes it


async def test_a_worker_that_cannot_serve_ends_the_start(tmp_path: Path) -> None:
    """The configuration is refused with its place: here a certificate that is none."""
    pem = tmp_path / "broken.pem"
    pem.write_text("no certificate\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"listen: {{port: 0, tls: {{certificate: {pem}, private_key: {pem}}}}}\n"
        "admin: {enabled: false}\nworkers: 2\nendpoints: [http://127.0.0.1:9]\n"
    )
    with pytest.raises(AssertionError, match="no PEM certificate") as raised:
        async with kvproxy_serve("-c", str(config)):
            pass
    assert "error: listen.tls.certificate" in str(raised.value)
    assert "Traceback" not in str(raised.value)
