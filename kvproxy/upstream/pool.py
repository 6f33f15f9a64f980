"""The forwarding pool: sends requests to engines over kept connections, streams their responses back."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvproxy.errors import ConnectError, ConnectTimeout, NoDescriptors, UpstreamDisconnected
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Clock, Headers
from kvproxy.upstream.connection import Connection, Timeouts
from kvproxy.upstream.head import encode_head
from kvproxy.upstream.lane import LaneLimits, OriginPool
from kvproxy.upstream.origin import Origin
from kvproxy.upstream.response import UpstreamResponse
from kvproxy.upstream.upload import LAST_CHUNK, SLICE_BYTES, chunked, in_slices

__all__ = ["Timeouts", "UpstreamPool", "UpstreamResponse"]

logger = logging.getLogger(__name__)

#: The machine's or the process's own want, not the engine's fault.
_OUT_OF_SOCKETS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SAY_AGAIN_S = 60.0

Body = bytes | AsyncIterator[bytes] | None


@dataclass(slots=True)  # not frozen, which would triple the cost of making one
class _Message:
    """A request as it goes on the wire: what can be sent (and sent again) at once, and the rest of its body."""

    method: bytes
    data: bytes
    rest: AsyncIterator[bytes] | None
    rest_bytes: int | None
    large: bytes | None = None  # a body that is there, and sent in slices


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
    ) -> None:
        kept = max_idle if idle_timeout_s > 0 else 0
        self._limits = LaneLimits(max_connections, kept, idle_timeout_s, max_waiting)
        self._high_water_bytes = high_water_bytes
        self._clock = clock
        self._lanes: dict[Origin, OriginPool] = {}
        self._uploads: set[asyncio.Task[None]] = set()
        self._closed = True
        self._silent_until = -math.inf
        self._replays = None if metrics is None else metrics.upstream.replays
        self._connects = None if metrics is None else metrics.upstream.connects
        if metrics is not None:
            self._show(metrics)

    async def __aenter__(self) -> UpstreamPool:
        self._closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        lanes = list(self._lanes.values())
        uploads = list(self._uploads)
        for lane in lanes:
            await lane.close(ConnectError("the pool is closed"))
        await asyncio.gather(*uploads, return_exceptions=True)

    @property
    def open(self) -> int:
        """Connections open or being opened."""
        return sum(lane.open for lane in self._lanes.values())

    @property
    def idle(self) -> int:
        """Connections kept without a request."""
        return sum(lane.idle for lane in self._lanes.values())

    @property
    def waiting(self) -> int:
        """Requests waiting for a connection."""
        return sum(lane.waiting for lane in self._lanes.values())

    async def request(
        self, origin: Origin, method: bytes, target: bytes, headers: Headers, body: Body, *, timeouts: Timeouts
    ) -> UpstreamResponse:
        """The response once its head is there; the caller reads it to the end or aborts it.

        Host and the framing header are written unless `headers` has them. A connection kept from an earlier request
        that dies before any byte of the response is replaced once, when the body is bytes. Raises UpstreamError's
        kinds, UnsafeRequest before anything was sent, and whatever an iterated body raises.
        """
        message = _encode(origin, method, target=target, headers=headers, body=body)
        lane = self._lane(origin)
        connection = lane.take_idle()
        if connection is None:
            connection, kept = await self._acquire(lane, timeouts.connect_s)
        else:
            kept = True
        try:
            return await self._exchange(connection, message, timeouts=timeouts)
        except UpstreamDisconnected:
            if not kept or connection.heard or message.rest is not None or self._closed:
                raise
        if self._replays is not None:
            self._replays.inc()
        lane = self._lane(origin)
        lane.make_room()
        connection, _ = await self._acquire(lane, timeouts.connect_s)
        return await self._exchange(connection, message, timeouts=timeouts)

    async def _exchange(self, connection: Connection, message: _Message, *, timeouts: Timeouts) -> UpstreamResponse:
        response = connection.send(message.method, message.data, timeouts=timeouts)
        rest = message.rest if message.large is None else in_slices(message.large)
        if rest is not None:
            upload = connection.send_body_from(rest, message.rest_bytes)
            self._uploads.add(upload)
            upload.add_done_callback(self._uploads.discard)
        try:
            await response.started()
        except BaseException:
            response.abort()
            raise
        return response

    def _lane(self, origin: Origin) -> OriginPool:
        lane = self._lanes.get(origin)
        if lane is None:
            if self._closed:
                raise ConnectError("the pool is closed")
            lane = self._lanes[origin] = OriginPool(origin, self._limits, clock=self._clock, on_empty=self._forget)
        return lane

    def _forget(self, lane: OriginPool) -> None:
        if self._lanes.get(lane.origin) is lane:
            del self._lanes[lane.origin]

    async def _acquire(self, lane: OriginPool, timeout_s: float) -> tuple[Connection, bool]:
        """A connection for one request, and whether it served others before."""
        while not lane.reserve():
            connection = await lane.wait(timeout_s)
            if connection is None:  # the slot is ours
                break
            if not connection.closed:
                return connection, True
        return await self._connect(lane, timeout_s), False

    async def _connect(self, lane: OriginPool, timeout_s: float) -> Connection:
        """Opens a connection in a slot already reserved; the slot is freed when that fails."""
        try:
            connection = await self._open_connection(lane.origin, timeout_s)
        except BaseException as error:
            lane.free_slot()
            self._count_connect(error.reason if isinstance(error, ConnectError | NoDescriptors) else "cancelled")
            raise
        if not lane.adopt(connection) or self._closed:
            connection.close()
            raise ConnectError("the pool is closed" if self._closed else f"{lane.origin} closed at once")
        self._count_connect("ok")
        return connection

    async def _open_connection(self, origin: Origin, timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s or None):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop=loop, high_water_bytes=self._high_water_bytes),
                    origin.host,
                    origin.port,
                    ssl=origin.ssl_context,
                    server_hostname=origin.server_name or None if origin.ssl_context else None,
                )
        except TimeoutError:
            raise ConnectTimeout(f"no connection to {origin} within {timeout_s:g} s") from None
        except OSError as error:
            if error.errno in _OUT_OF_SOCKETS:
                self._say_out_of_sockets(error)
                raise NoDescriptors(f"no socket for {origin}: {error}") from error
            raise ConnectError(f"{origin}: {error}") from error
        except ValueError as error:  # a host name or certificate file that cannot be used
            raise ConnectError(f"{origin}: {error}") from error
        return connection

    def _say_out_of_sockets(self, error: OSError) -> None:
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + _SAY_AGAIN_S
            logger.warning(
                "no socket to an engine: %s (raise the limit on open files: `ulimit -n`, LimitNOFILE)", error
            )

    def _count_connect(self, outcome: str) -> None:
        if self._connects is not None:
            self._connects.labels(outcome).inc()

    def _show(self, metrics: Metrics) -> None:
        """Gauges are read when they are scraped, so they cost a request nothing."""
        metrics.upstream.connections.labels("open").set_function(lambda: self.open)
        metrics.upstream.connections.labels("idle").set_function(lambda: self.idle)
        metrics.bounds.queue_depth.labels("upstream").set_function(lambda: self.waiting)
        metrics.bounds.queue_limit.labels("upstream").set(self._limits.max_waiting)


def _encode(origin: Origin, method: bytes, *, target: bytes, headers: Headers, body: Body) -> _Message:
    if body is None or isinstance(body, bytes):
        size = 0 if body is None else len(body)
        head, length = encode_head(
            origin, method, target=target, headers=headers, body_bytes=size, has_body=body is not None
        )
        if not body:
            data = head if length is not None else head + LAST_CHUNK
        elif length is None:
            data = head + chunked(body) + LAST_CHUNK
        elif size > SLICE_BYTES:
            return _Message(method, head, None, length, body)
        else:
            data = head + body
        return _Message(method, data, None, None)
    head, length = encode_head(origin, method, target=target, headers=headers, body_bytes=None, has_body=True)
    return _Message(method, head, body, length)
