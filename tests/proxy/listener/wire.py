"""A client connection without a socket: what the protocol writes is kept, and closing is told as a loop would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from kvproxy.proxy.listener.parser import ListenerLimits
from kvproxy.proxy.listener.protocol import ClientProtocol
from tests.support.until import until


class Wire(asyncio.Transport):
    """The transport of one `ClientProtocol`. `stuck_bytes` is what its client does not take."""

    def __init__(self, app: Any, limits: ListenerLimits | None = None) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.stuck_bytes = 0
        self.reading = True
        self.ended = False  # no more is written
        self.closing = False
        self.gone = False
        self.loop = asyncio.get_running_loop()
        self.state = ServerState()
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        self.protocol = ClientProtocol(
            config, self.state, {}, limits=limits or ListenerLimits(), on_refused=lambda: None
        )
        self.protocol.connection_made(self)

    @property
    def output(self) -> bytes:
        return b"".join(self.written)

    async def settle(self) -> None:
        """Until nothing runs that waits for no one."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def say(self, pieces: Iterable[bytes], *, patient: bool = False) -> None:
        """Send these pieces as far as they are read; a patient client waits for answers in between."""
        for piece in pieces:
            await until(lambda: self.reading or self.closing)
            if self.closing:
                break
            self.protocol.data_received(piece)
            if patient:
                await self.settle()
        await self.settle()

    def leave(self) -> None:
        """Leave as a client."""
        self.abort()

    # asyncio.Transport

    def write(self, data: Any) -> None:
        assert not self.ended
        if not self.closing:
            self.written.append(data)

    def writelines(self, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            self.write(piece)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.9", 999), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def get_write_buffer_size(self) -> int:
        return self.stuck_bytes

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.stuck_bytes:
                self._lose()

    def abort(self) -> None:
        self.closing = True
        self._lose()

    def _lose(self) -> None:
        if not self.gone:
            self.gone = True
            self.loop.call_soon(self.protocol.connection_lost, None)
