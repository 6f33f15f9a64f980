"""The forwarding pool: sends requests to engines over kept connections, streams their responses back."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable

from kvproxy.base.errors import ConnectError, ConnectTimeout, NoDescriptors, UpstreamDisconnected
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.types import Clock, Headers
from kvproxy.base.upstream.connection import Connection, Timeouts
from kvproxy.base.upstream.metrics import ConnectionMetrics
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.origin_pool import OriginPool, PoolLimits
from kvproxy.base.upstream.request import NO_FIELDS, Body, RepeatedFields, encode_request
from kvproxy.base.upstream.response import UpstreamResponse

__all__ = ["Timeouts", "UpstreamPool", "UpstreamResponse"]

logger = logging.getLogger(__name__)

#: The machine or the process has run out of sockets, which is not the engine's fault.
_OUT_OF_SOCKETS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_WARN_AGAIN_S = 60.0


class UpstreamPool:
    """Connections to any number of origins, each within the same bounds. Enter it before the first request.

    Leaving closes everything at once; drain before. `high_water_bytes` bounds what is read ahead of a slow reader.
    """

    def __init__(
        self,
        *,
        max_connections: int = 1024,
        max_idle: int = 256,
        idle_timeout_s: float = 4.0,
        max_waiting: int = 4096,
        high_water_bytes: int = 256 * 1024,
        clock: Clock = time.monotonic,
        metrics: Metrics | None = None,
        certificates: CertificateWatch | None = None,
    ) -> None:
        self._certificates = certificates or CertificateWatch()
        kept = max_idle if idle_timeout_s > 0 else 0
        self._limits = PoolLimits(max_connections, kept, idle_timeout_s, max_waiting)
        self._high_water_bytes = high_water_bytes
        self._clock = clock
        self._pools: dict[str, OriginPool] = {}  # by `Origin.key`
        self._uploads: set[asyncio.Task[None]] = set()
        self._closed = True
        self._silent_until = -math.inf
        self._replays = None if metrics is None else metrics.group(ConnectionMetrics).replays
        self._connects = None if metrics is None else metrics.group(ConnectionMetrics).connects
        if metrics is not None:
            self._register_gauges(metrics)

    async def __aenter__(self) -> UpstreamPool:
        self._closed = False
        self._pools.clear()  # of an event loop that ended without leaving
        self._uploads.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        uploads = list(self._uploads)
        for pool in list(self._pools.values()):
            await pool.close(ConnectError("the pool is closed"))
        await asyncio.gather(*uploads, return_exceptions=True)

    @property
    def open(self) -> int:
        """Connections open or being opened."""
        return sum(pool.open for pool in self._pools.values())

    @property
    def idle(self) -> int:
        """Connections kept without a request."""
        return sum(pool.idle for pool in self._pools.values())

    @property
    def waiting(self) -> int:
        """Requests waiting for a connection."""
        return sum(pool.waiting for pool in self._pools.values())

    async def request(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: Body,
        *,
        start: bytes = b"",
        timeouts: Timeouts,
        early: bool = True,
        once: bool = False,
        on_head: Callable[[UpstreamResponse], None] | None = None,
        repeated: RepeatedFields = NO_FIELDS,
    ) -> UpstreamResponse:
        """Send a request and return the response once its head is there; the caller reads it to the end or aborts it.
        Unless `early`, a part of its body or its end is there too, but for a status of 500 or more; `on_head` is called
        with a head that came before that.

        `start` is written before the body and belongs to it. Host and the framing header are written unless `headers`
        has them, the `repeated` fields behind them. A connection kept from an earlier request that dies before any byte
        of the response is replaced, when the body is bytes and may be sent more than `once`. Raises UpstreamError's
        kinds, UnsafeRequest before anything was sent, and whatever an iterated body raises."""
        request = encode_request(
            origin, method, target=target, headers=headers, body=body, start=start, repeated=repeated
        )
        pool = self._pools.get(origin.key) or self._new_pool(origin)
        connection = pool.acquire_idle()
        kept = connection is not None
        if connection is None:
            connection, kept = await self._acquire(pool, timeouts.connect_s)
        while True:
            response = connection.send(request, timeouts, early=early, on_head=on_head)
            try:
                await response.changed()
                if not response.status:
                    raise response.take_error()
            except UpstreamDisconnected:
                response.abort()
                if once or not kept or connection.parser.heard or not request.replayable or self._closed:
                    raise
            except BaseException:
                response.abort()
                raise
            else:
                return response
            if self._replays is not None:
                self._replays.inc()
            pool = self._pools.get(origin.key) or self._new_pool(origin)
            pool.make_room()
            connection, _ = await self._acquire(pool, timeouts.connect_s)
            kept = False

    def _new_pool(self, origin: Origin) -> OriginPool:
        if self._closed:
            raise ConnectError("the pool is closed")
        pool = self._pools[origin.key] = OriginPool(origin, self._limits, clock=self._clock, on_empty=self._forget)
        return pool

    def _forget(self, pool: OriginPool) -> None:
        if self._pools.get(pool.origin.key) is pool:
            del self._pools[pool.origin.key]

    async def _acquire(self, pool: OriginPool, timeout_s: float) -> tuple[Connection, bool]:
        """Return a connection for one request, and whether it served others before."""
        while not pool.reserve_slot():
            connection = await pool.wait_in_line(timeout_s)
            if connection is None:  # the slot is ours
                break
            if not connection.closed:
                return connection, True
        return await self._connect(pool, timeout_s), False

    async def _connect(self, pool: OriginPool, timeout_s: float) -> Connection:
        """Open a connection in a slot already reserved; the slot is freed when that fails."""
        try:
            connection = await self._open_connection(pool.origin, timeout_s)
        except BaseException as error:
            pool.free_slot()
            self._count_connect(error.reason if isinstance(error, ConnectError | NoDescriptors) else "cancelled")
            raise
        if not pool.adopt_connection(connection) or self._closed:
            connection.close()
            raise ConnectError("the pool is closed" if self._closed else f"{pool.origin} closed at once")
        self._count_connect("ok")
        return connection

    async def _open_connection(self, origin: Origin, timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            context = self._certificates.client_context(origin.tls) if origin.scheme == "https" else None
            async with asyncio.timeout(timeout_s or None):
                _, connection = await loop.create_connection(
                    lambda: Connection(
                        loop=loop,
                        high_water_bytes=self._high_water_bytes,
                        uploads=self._uploads,
                    ),
                    origin.host,
                    origin.port,
                    ssl=context,
                    server_hostname=origin.server_name or None if context else None,
                )
        except TimeoutError:
            raise ConnectTimeout(f"no connection to {origin} within {timeout_s:g} s") from None
        except OSError as error:
            if error.errno in _OUT_OF_SOCKETS:
                self._warn_out_of_sockets(error)
                raise NoDescriptors(f"no socket for {origin}: {error}") from error
            raise ConnectError(f"{origin}: {error}") from error
        except ValueError as error:  # an unusable host name or certificate file
            raise ConnectError(f"{origin}: {error}") from error
        return connection

    def _warn_out_of_sockets(self, error: OSError) -> None:
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + _WARN_AGAIN_S
            logger.warning(
                "no socket to an engine: %s (raise the limit on open files: `ulimit -n`, LimitNOFILE)", error
            )

    def _count_connect(self, outcome: str) -> None:
        if self._connects is not None:
            self._connects.labels(outcome).inc()

    def _register_gauges(self, metrics: Metrics) -> None:
        """Gauges are read when they are scraped, so they cost a request nothing."""
        connections = metrics.group(ConnectionMetrics).connections
        connections.labels("open").set_function(lambda: self.open)
        connections.labels("idle").set_function(lambda: self.idle)
        metrics.group(BoundMetrics).show_queue("upstream", lambda: self.waiting, limit=self._limits.max_waiting)
