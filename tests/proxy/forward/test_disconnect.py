"""The client left: noticed through our listener's connection, and through `receive` under any other server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from kvproxy.base.types import CONNECTION
from kvproxy.proxy.forward.relay import DisconnectWatcher, new_arming


class Server:
    """Makes scopes as ours does (with a connection) or as others do, and lets clients leave."""

    def __init__(self, *, ours: bool) -> None:
        self.on_disconnect: Callable[[], None] | None = None
        self.disconnected = False
        self.scope: dict[str, Any] = {"type": "http", **({CONNECTION: self} if ours else {})}
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def client_leaves(self) -> None:
        self._gone.set()
        self.disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()


async def forever(watcher: DisconnectWatcher, armed: asyncio.Event) -> str:
    """Do as the router around a request, and wait for ever."""
    watcher.arm()
    armed.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not watcher.caused_cancellation():
            raise
        return "client left"
    finally:
        watcher.disarm()
    return "never"


@pytest.mark.parametrize("ours", [True, False])
async def test_the_work_is_cancelled_and_claimed(ours: bool) -> None:
    """The task goes on after the cancellation, as after a timeout."""
    server, armed = Server(ours=ours), asyncio.Event()
    watcher = DisconnectWatcher(server.scope.get(CONNECTION), server.receive, new_arming(0.001))
    task = asyncio.create_task(forever(watcher, armed))
    await armed.wait()
    server.client_leaves()
    assert await task == "client left"
    assert task.cancelling() == 0


@pytest.mark.parametrize("ours", [True, False])
async def test_somebody_elses_cancellation_is_not_claimed(ours: bool) -> None:
    """A shutdown cancels requests whose clients are still there."""
    server, armed = Server(ours=ours), asyncio.Event()
    watcher = DisconnectWatcher(server.scope.get(CONNECTION), server.receive, new_arming(0.001))
    task = asyncio.create_task(forever(watcher, armed))
    await armed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("ours", [True, False])
async def test_after_disarming_nothing_is_cancelled(ours: bool) -> None:
    """A client that leaves after its response ended cancels nothing, not even a watch that had begun."""
    server = Server(ours=ours)
    for wait_s in (0.0, 0.01):
        watcher = DisconnectWatcher(server.scope.get(CONNECTION), server.receive, new_arming(0.001))
        watcher.arm()
        await asyncio.sleep(wait_s)
        watcher.disarm()
    server.client_leaves()
    await asyncio.sleep(0.01)
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_a_departure_before_the_watch_counts() -> None:
    """The client may have left while the request's facts were gathered."""
    server = Server(ours=True)
    server.client_leaves()
    watcher = DisconnectWatcher(server.scope.get(CONNECTION), server.receive, new_arming())
    assert await asyncio.create_task(forever(watcher, asyncio.Event())) == "client left"
