"""Runs an ASGI app on a socket inside the current event loop: a uvicorn server as an async context manager."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import select
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import uvicorn

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.proxy.listener.cycle import HttpDate
from kvproxy.proxy.listener.parser import ListenerLimits
from kvproxy.proxy.listener.protocol import ClientProtocol
from kvproxy.proxy.settings import ListenerTls

#: Turns of the loop from accepting a connection until its transport is made, plus one.
_QUIET_TURNS = 4
_SO_ATTACH_FILTER = 26  # Linux
#: A classic BPF program on the TCP header: drop a segment with SYN and without ACK, and take all others.
_PROGRAM = (
    (0x30, 0, 0, 13),  # A = flags
    (0x54, 0, 0, 0x12),  # A &= SYN | ACK
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # take
)


def refuse_silently(listening: socket.socket) -> None:
    """Let the kernel drop new connections, whose clients try again after a second, and keep those it has. No effect
    where there are no such filters."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in _PROGRAM))
    with contextlib.suppress(OSError):
        pointer = struct.pack("@HP", len(_PROGRAM), ctypes.addressof(program))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


async def accept_queued(listening: Sequence[int], *, limit_s: float, in_hurry: Callable[[], bool]) -> None:
    """Let the loop accept what waits at these descriptors, for `limit_s` at most: more may always come.

    The kernel resets connections that wait in the queue of a socket that is closed, and an event loop drops those that
    it has accepted in its last two turns.
    """
    queues = select.poll()
    for number in listening:
        queues.register(number, select.POLLIN)
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    quiet_turns = 0
    while quiet_turns < _QUIET_TURNS and loop.time() < end and not in_hurry():
        quiet_turns = 0 if queues.poll(0) else quiet_turns + 1
        await asyncio.sleep(0)


logger = logging.getLogger(__name__)

#: Versions whose server makes our protocols: the range of pyproject.toml (a test compares them); its first and last are
#: tested.
UVICORN = "uvicorn>=0.35,<0.55"
_LOOK_AGAIN_S = 0.005
_BACKLOG = 2048
#: How long connections from before the end are let in: under load more may always come.
_LAST_ACCEPTS_S = 1.0
_SAY_AGAIN_S = 60.0


def require_uvicorn(version: str) -> None:
    """Raise ConfigError for a uvicorn whose server may treat our protocol otherwise than the tested ones do."""
    first, end = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[0-9.]+", UVICORN))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not first <= tuple(map(int, numbers.groups())) < end:
        problem = Problem(f"uvicorn {version}", "kvproxy's listener is not made for it", f"pip install '{UVICORN}'")
        raise ConfigError([problem])


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and its ticking: `stop` ends it."""

    def __init__(
        self, config: uvicorn.Config, *, drain_s: float, cut_grace_s: float, hurry: asyncio.Event | None, shared: bool
    ) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()
        self.stopping = False  # each further answer announces the close
        self._drain_s = drain_s
        self._cut_grace_s = cut_grace_s
        self._shared = shared
        self._hurry = hurry or asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Idle connections end with their next request or after the idle time, requests within the drain time,
        everything else after it."""
        state = self.server_state
        self.stopping = True
        for connection in list(state.connections):
            connection.shutdown()
        await self._accept_last()
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        await self._quiet(self._drain_s, self._hurry)
        if state.connections or state.tasks:
            logger.warning("cut %d connections that outlived the drain", len(state.connections))
        for connection in list(state.connections):
            connection.transport.abort()
        await self._quiet(self._cut_grace_s, asyncio.Event())  # their apps see the disconnect and end
        await cancel_tasks(state.tasks)
        for server in self.servers:
            await server.wait_closed()

    async def _accept_last(self) -> None:
        """Let in the connections that clients have made already."""
        numbers = [one.fileno() for server in self.servers for one in server.sockets]
        if not self._shared:
            for number in numbers:
                with socket.socket(fileno=os.dup(number)) as one:
                    refuse_silently(one)
        await accept_queued(numbers, limit_s=min(_LAST_ACCEPTS_S, self._drain_s), in_hurry=self._hurry.is_set)

    async def _quiet(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Return once no request runs and no connection is open, at `limit_s`, or in a hurry."""
        state = self.server_state
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while (state.connections or state.tasks) and loop.time() < end and not hurry.is_set():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_AGAIN_S)  # uvicorn's sets of connections and tasks notify no one


class Server:
    """Serves `app` from `__aenter__` on.

    Leaving stops accepting, answers the next request of an idle connection with `connection: close` (or closes it after
    `limits.closing_idle_s`), lets running requests end for at most `drain_s` (or until `hurry` is set), then cuts what
    is left and gives its apps `cut_grace_s` to notice before they are cancelled. `limits` bound what clients may
    """

    def __init__(
        self,
        app: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sockets: Sequence[socket.socket] | None = None,
        shared: bool = False,
        drain_s: float = 5.0,
        cut_grace_s: float = 1.0,
        hurry: asyncio.Event | None = None,
        tls: ListenerTls | None = None,
        certificates: CertificateWatch | None = None,
        limits: ListenerLimits | None = None,
        on_refused: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        require_uvicorn(uvicorn.__version__)
        self._host = host
        self._tls = tls
        self._certificates = certificates or CertificateWatch()
        self._limits = limits or ListenerLimits()
        self._on_refused = on_refused
        self._silent_until = 0.0  # loop time
        protocol = functools.partial(
            ClientProtocol,
            limits=self._limits,
            on_refused=self._refused,
            is_stopping=lambda: self.stopping,
            dates=HttpDate(),
        )
        defaults: dict[str, Any] = {
            "http": protocol,
            "loop": "none",
            "ws": "none",
            "lifespan": "off",
            "access_log": False,
            "log_config": None,
            "server_header": False,
            "date_header": False,  # ours is made once a second, and only if an engine sent none
            "proxy_headers": False,  # the router filter decides which to trust
        }
        config = uvicorn.Config(app, host=host, port=port, **(defaults | options))
        self._server = _Server(config, drain_s=drain_s, cut_grace_s=cut_grace_s, hurry=hurry, shared=shared)
        self._sockets = None if sockets is None else list(sockets)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port (also when asked for port 0)."""
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._server.server_state.connections)

    @property
    def url(self) -> str:
        """Base URL."""
        return url_of(self._host, self.port, tls=self._tls is not None)

    @property
    def stopping(self) -> bool:
        """The end has begun."""
        return self._server.stopping

    async def __aenter__(self) -> Server:
        self._task = asyncio.create_task(self._serve(), name=f"server {self._host}")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError(f"cannot listen on {self._host}:{self._server.config.port}")
            await asyncio.sleep(0.002)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.stop.set()
        if self._task is not None:
            await self._task

    def _refused(self) -> None:
        self._on_refused()
        now = asyncio.get_running_loop().time()
        if now >= self._silent_until:
            self._silent_until = now + _SAY_AGAIN_S
            count = self._limits.max_connections
            logger.warning("clients are refused: all %d connections of %s are taken", count, self.url)

    async def _serve(self) -> None:
        # the exception below reports it, with more detail
        logging.getLogger("uvicorn.error").addFilter(_is_no_bind_error)
        config = self._server.config
        config.load()
        if self._tls is not None:
            config.ssl = self._certificates.server_context("listen", self._tls.files)
        try:
            await self._server.serve(self._sockets)
        except SystemExit as error:  # uvicorn's exit for "cannot bind"
            raise OSError(_why_not(self._host, self._server.config.port, error.__context__)) from error


def url_of(host: str, port: int, *, tls: bool) -> str:
    """Return the base URL of a listener."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def bind_sockets(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Return sockets that listen at every address of the host, for processes that share them. OSError explains what to
    do. `reuse_port`: beside other processes that listen there and allow it as well."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            bound.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(_BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in bound:
            one.close()
        raise OSError(_why_not(host, port, error)) from error
    return bound


def _is_no_bind_error(record: logging.LogRecord) -> bool:
    return not isinstance(record.msg, OSError)


def _why_not(host: str, port: int, cause: BaseException | None) -> str:
    """Return what to do about a socket that cannot be bound; uvicorn exits while it handles the cause."""
    what = f"cannot listen on {host}:{port}"
    if not isinstance(cause, OSError):
        return what
    if cause.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        return f"{what}: the port is taken{f' by {holder}' if holder else ''}; end that, or listen on another one"
    if cause.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this machine has no such address"
    if cause.errno == errno.EACCES:
        return f"{what}: not allowed; ports below 1024 need root or CAP_NET_BIND_SERVICE"
    return f"{what}: {cause.strerror or cause}"


@contextlib.asynccontextmanager
async def serve(app: Any, **options: Any) -> AsyncIterator[str]:
    """Yield the base URL of `app`, served for the length of the block."""
    async with Server(app, **options) as server:
        yield server.url


def holder_of(port: int) -> str:
    """Return the process that listens on a port, for the message when it is taken: `python3 (pid 4711)`, or empty
    if it cannot be found out."""
    import psutil  # only where a start fails

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,) and one.pid is not None:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    return ""
