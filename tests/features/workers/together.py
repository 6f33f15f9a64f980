"""Several workers in one process: real proxies with real control sockets, and the operator's listener over them."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvproxy.app import Proxy
from kvproxy.base.metrics.groups import Metrics
from kvproxy.features.exchange.operated import find_service
from kvproxy.features.exchange.peers import SyncStatus
from kvproxy.features.workers.admin import WorkersAdmin
from kvproxy.features.workers.assignment import Assignment, take_share
from kvproxy.features.workers.control import ControlApp
from kvproxy.features.workers.process import WorkerProcess
from kvproxy.features.workers.supervisor import ServedConfig, Supervisor, bind_control
from kvproxy.features.workers.workers import Workers
from kvproxy.operate.companion import Siblings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server
from tests.support.proxy import PATIENT
from tests.support.until import until


def status_of(proxy: Proxy) -> SyncStatus | None:
    """How it stands with the others."""
    service = find_service(proxy)
    return None if service is None else service.status


@dataclass
class Together:
    """All of it; `admin` asks the one listener, `clients` the workers' public ones."""

    workers: Workers
    proxies: list[Proxy]
    admin: httpx.AsyncClient
    clients: list[httpx.AsyncClient]

    async def live(self) -> dict[str, Any]:
        """Return the contents of the page."""
        answer = await self.admin.get("/live")
        assert answer.status_code == 200, answer.text
        data: dict[str, Any] = answer.json()
        return data

    async def metric(self, series: str) -> float:
        """Return a sample of the one page; 0: it is not there."""
        lines = (await self.admin.get("/metrics")).text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), 0.0)

    async def synced(self) -> None:
        """Until each knows the others."""
        await until(lambda: all(status_of(one) is SyncStatus.SYNCED for one in self.proxies))

    def end(self, index: int) -> None:
        """As when this worker's process is gone."""
        slot = self.workers.supervisor.slots[index]
        slot.process = None
        os.close(slot.file)
        again = slot.path.with_name(f"{slot.path.name}-again")
        slot.control, slot.path, slot.file = bind_control(again)  # the one there was ends with its worker here
        for call in self.workers.supervisor.on_ended:
            call(index)


@contextlib.asynccontextmanager
async def together(
    endpoints: dict[str, str], *, count: int = 2, answer_s: float = 60.0, **config: Any
) -> AsyncIterator[Together]:
    """`config` is native configuration besides the endpoints; probes are off, and workers have time to answer."""
    raw = {"endpoints": endpoints, "policy": "round_robin", "health": {"active": False}, **PATIENT, **config}
    served, metrics = ServedConfig(load_config(raw)), Metrics()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        supervisor = Supervisor(served, count=count, public=(), folder=folder)
        stack.callback(supervisor._close)
        workers = await stack.enter_async_context(Workers(supervisor, metrics=metrics, answer_s=answer_s))
        proxies = [await stack.enter_async_context(begin_worker(supervisor, index)) for index in range(count)]
        admin = WorkersAdmin(workers, clock=time.monotonic)
        supervisor.on_ended.append(admin.metrics.note_ended)
        urls = [(await stack.enter_async_context(Server(app, drain_s=1.0))).url for app in (admin.app(), *proxies)]
        clients = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60)) for url in urls]
        yield Together(workers, proxies, clients[0], clients[1:])


@contextlib.asynccontextmanager
async def begin_worker(supervisor: Supervisor, index: int) -> AsyncIterator[Proxy]:
    """One in this process, at its socket."""
    slot, served = supervisor.slots[index], supervisor.served
    own = socket.socket(fileno=slot.control.detach())
    assignment = Assignment(
        index, len(supervisor.slots), served.config, served.changes, (), own.fileno(), slot.path.parent, bytes(16)
    )
    siblings = Siblings(slot.path.parent, index, assignment.count)
    async with Proxy(take_share(served.config, index, assignment.count), siblings=siblings) as proxy:
        control = ControlApp(proxy, assignment)
        await control.repeat_changes(assignment.changes)
        async with Server(control, sockets=[own], drain_s=1.0):
            slot.process = WorkerProcess(assignment)
            slot.process.ready, slot.process.told = True, served.number
            yield proxy
