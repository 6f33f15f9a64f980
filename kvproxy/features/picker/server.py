"""The picker as a server: Envoy's external processing and the health services on one listener."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Protocol, Self

from google.protobuf.message import DecodeError

from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.features.picker.conversation import Conversations
from kvproxy.features.picker.grpc import GrpcServer, Method, Replies, Status
from kvproxy.features.picker.messages import (
    CHECK,
    EXT_PROC,
    NOT_SERVING,
    PROCESS,
    SERVING,
    UNKNOWN,
    WATCH,
    HealthCheckRequest,
    HealthCheckResponse,
)
from kvproxy.features.picker.metrics import PickerMetrics
from kvproxy.features.picker.settings import PickerSettings
from kvproxy.operate.placing.carried import Placer
from kvproxy.operate.placing.external import PlacerTarget
from kvproxy.proxy.request.body import HeldBodies

#: Memory of a message beside a body in it.
_MESSAGE_BYTES = 1024 * 1024
#: A request counts as load of its endpoint until Envoy says that it is over, and never longer than this.
LEASE_S = 3600.0
#: A watch of the health looks so often for a change.
_LOOK_S = 0.5
#: Envoy has a connection or two for each of its workers.
_MAX_CONNECTIONS = 1024


class ServedTarget(PlacerTarget, Protocol):
    """The running proxy, as far as the server needs it."""

    @property
    def bodies(self) -> HeldBodies: ...
    @property
    def draining(self) -> bool: ...
    @property
    def certificates(self) -> CertificateWatch: ...


class PickerServer:
    """Answers Envoy for the length of the block; then requests it carries have the drain time to end."""

    def __init__(self, target: ServedTarget, settings: PickerSettings) -> None:
        self._target = target
        config = target.config
        metrics = target.metrics
        placer = Placer(target, lease_s=LEASE_S, fallbacks=settings.fallbacks, queue="picker")
        self._conversations = Conversations(placer, held=target.bodies, metrics=metrics)
        self._watches: set[HealthWatch] = set()
        methods: dict[str, Method] = {
            PROCESS: self._conversations.begin,
            CHECK: self._check,
            WATCH: self._watch,
        }
        self._server = GrpcServer(
            methods,
            host=settings.host,
            port=settings.port,
            tls=settings.tls,
            certificates=target.certificates,
            held=target.bodies,
            most_bytes=config.limits.body + _MESSAGE_BYTES,
            max_streams=config.limits.connections,
            max_connections=_MAX_CONNECTIONS,
            drain_s=config.shutdown.drain,
            on_closed=lambda why: metrics.group(PickerMetrics).closed.labels(why).inc(),
        )
        self._running = AsyncExitStack()
        for name, limit in (("picker_connections", _MAX_CONNECTIONS), ("picker_streams", config.limits.connections)):
            metrics.group(BoundMetrics).queue_limit.labels(name).set(limit)
        metrics.group(BoundMetrics).queue_depth.labels("picker_connections").set_function(
            lambda: len(self._server.connections)
        )
        metrics.group(BoundMetrics).queue_depth.labels("picker_streams").set_function(lambda: self._server.streams)

    @property
    def port(self) -> int:
        """The bound port."""
        return self._server.port

    @property
    def streams(self) -> int:
        """Requests that Envoy carries now."""
        return self._server.streams - len(self._watches)

    async def __aenter__(self) -> Self:
        await self._running.enter_async_context(self._conversations.tasks)
        await self._running.enter_async_context(self._server)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    def _check(self, replies: Replies) -> HealthCheck:
        return HealthCheck(self._target, replies)

    def _watch(self, replies: Replies) -> HealthWatch:
        return HealthWatch(self._target, replies, self._watches)


class HealthCheck:
    """One `Check`: alive always; ready until the drain begins, while a cluster has an endpoint that takes requests."""

    def __init__(self, target: ServedTarget, replies: Replies) -> None:
        self._target = target
        self._replies = replies

    def message(self, raw: bytes) -> None:
        """As of Call."""
        try:
            service = HealthCheckRequest.FromString(raw).service
        except DecodeError:
            self._replies.end(Status.INVALID_ARGUMENT, "not a HealthCheckRequest")
        else:
            self.answer(service)

    def answer(self, service: str) -> None:
        """How it is now, once."""
        status = self.find_status(service)
        if status == UNKNOWN:
            self._replies.end(Status.NOT_FOUND, "no such service")
            return
        self._replies.send(HealthCheckResponse(status=status).SerializeToString())
        self._replies.end()

    def find_status(self, service: str) -> int:
        """Of a service, by its name."""
        if service == "liveness":
            return SERVING
        return (SERVING if self._is_ready() else NOT_SERVING) if service in ("", "readiness", EXT_PROC) else UNKNOWN

    def half_closed(self) -> None:
        """As of Call."""
        self._replies.end(Status.INVALID_ARGUMENT, "no HealthCheckRequest came")

    def gone(self) -> None:
        """As of Call: there is nothing to give back."""

    def _is_ready(self) -> bool:
        target = self._target
        now = target.clock()
        return not target.draining and any(cluster.screening.may_serve("", now) for cluster in target.clusters.values())


class HealthWatch(HealthCheck):
    """One `Watch`: the same now, and again whenever it changed, until the drain begins."""

    def __init__(self, target: ServedTarget, replies: Replies, watches: set[HealthWatch]) -> None:
        super().__init__(target, replies)
        self._watches = watches
        self._said: int | None = None
        self._again: asyncio.TimerHandle | None = None

    def answer(self, service: str) -> None:
        """How it is now, and from now on; what is asked after that is not."""
        if self not in self._watches:
            self._watches.add(self)
            self._look(service)

    def _look(self, service: str) -> None:
        if (status := self.find_status(service)) != self._said:
            self._said = status
            self._replies.send(HealthCheckResponse(status=status).SerializeToString())
        if self._target.draining:
            self.gone()
            self._replies.end()
        else:
            self._again = asyncio.get_running_loop().call_later(_LOOK_S, self._look, service)

    def half_closed(self) -> None:
        """As of Call: all has been asked."""
        if self._again is None:
            super().half_closed()

    def gone(self) -> None:
        """As of Call."""
        self._watches.discard(self)
        if self._again is not None:
            self._again.cancel()
