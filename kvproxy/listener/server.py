"""Runs an ASGI app on a socket inside the current event loop: a uvicorn server as an async context manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: who starts it decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves `app` from `__aenter__` on; leaving drains open requests for at most `drain_s`, then cancels them."""

    def __init__(
        self, app: Any, *, host: str = "127.0.0.1", port: int = 0, drain_s: float = 5.0, **options: Any
    ) -> None:
        self._host = host
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            **options,
        )
        self._tls = config.ssl_certfile is not None
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port (also when asked for port 0)."""
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{'https' if self._tls else 'http'}://{self._host}:{self.port}"

    async def __aenter__(self) -> Server:
        self._task = asyncio.create_task(self._server.serve(), name=f"server {self._host}")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError(f"cannot listen on {self._host}:{self._server.config.port}")
            await asyncio.sleep(0.002)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


@contextlib.asynccontextmanager
async def serve(app: Any, **options: Any) -> AsyncIterator[str]:
    """The base URL of `app`, served for the length of the block."""
    async with Server(app, **options) as server:
        yield server.url
