"""The kvcache filter for another ASGI app: `from kvproxy import KVCacheMiddleware`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.cluster.cluster import Cluster
from kvproxy.config.cluster_schema import ClusterSettings, EndpointSettings
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.filters.inference_request import KIND_OF_PATH
from kvproxy.filters.kvcache import STATE_KEY, announce
from kvproxy.kvcache.overlap.facts import RequestFacts, Result
from kvproxy.kvcache.service import KvCache
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.body import BodiesFull, HeldBodies, Pieces, replay
from kvproxy.request.parse import read_body
from kvproxy.request.usage import read_usage
from kvproxy.types import Clock, EndpointId, RequestKind

log = logging.getLogger("kvproxy.kvcache")

#: Where the app may say which endpoint it used; else the response's `x-kvproxy-endpoint` header says it.
SERVED_KEY = "llm_served_endpoint_id"
_SERVED_HEADER = b"x-kvproxy-endpoint"
_CLUSTER = "default"
_TAIL_BYTES = 16 * 1024
_KEPT_BYTES = 256 * 1024  # of a piece of the answer


class HasScope(Protocol):
    """A request of Starlette, FastAPI or anything else that keeps its ASGI scope."""

    @property
    def scope(self) -> MutableMapping[str, Any]: ...


def preferred(request: HasScope | MutableMapping[str, Any]) -> str | None:
    """The endpoint that holds most of this request's prompt, by its id; None when no endpoint is known to hold any.

    `request` is the one the app got, or its ASGI scope.
    """
    endpoint = _state(request).get(STATE_KEY)
    return None if endpoint is None else str(endpoint)


def served(request: HasScope | MutableMapping[str, Any], endpoint: str) -> None:
    """Tells the middleware which endpoint this request went to; called before the response ends."""
    _state(request)[SERVED_KEY] = endpoint


def _state(request: HasScope | MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    scope = request if isinstance(request, MutableMapping) else request.scope
    state: MutableMapping[str, Any] = scope.setdefault("state", {})
    return state


class KVCacheMiddleware:
    """Names the endpoint that holds most of a prompt (`preferred`; also in `scope["state"]`, and in a request header
    with `settings.preference_header`); after the response it learns, pins, compresses and evicts.

    `endpoints` are the engines the app chooses from: `{id: url}`, or `EndpointSettings` of
    `kvproxy.config.cluster_schema`. `settings` are those of the `kvcache` filter, as `KvCacheSettings` or plain data.
    The app tells which endpoint it used with `served`, or by the response header `x-kvproxy-endpoint`; without either
    nothing is learned.

    It never answers, and never fails a request. Its background tasks run between ASGI's lifespan events, or inside
    `async with middleware`; under a server that sends neither they start with the first request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        endpoints: Mapping[str, str] | Sequence[EndpointSettings],
        settings: KvCacheSettings | Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        limit_bytes: int = 32 * 1024 * 1024,
        limit_all_bytes: int = 1024 * 1024 * 1024,
        session_header: str = "x-session-id",
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._app = app
        self.metrics = Metrics() if metrics is None else metrics
        rng = random.Random() if rng is None else rng
        if not isinstance(settings, KvCacheSettings):
            settings = KvCacheSettings.model_validate(settings or {})
        if isinstance(endpoints, Mapping):
            endpoints = [EndpointSettings(id=name, url=url) for name, url in endpoints.items()]
        cluster = ClusterSettings(endpoints=tuple(endpoints))
        self._cluster = Cluster(_CLUSTER, cluster, metrics=self.metrics, clock=clock, rng=rng)
        self._cluster.show()
        self.service = KvCache(settings, clusters={_CLUSTER: self._cluster}, metrics=self.metrics, clock=clock, rng=rng)
        self._header = settings.preference_header.lower().encode()
        self._enabled = settings.enabled
        self._session_header = session_header.lower().encode()
        self._limit_bytes = limit_bytes
        self._held = HeldBodies(limit_all_bytes, metrics=self.metrics)
        self._started = False
        self._starting = asyncio.Lock()
        self._pace = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._starting:
            if not self._started:
                await self.service.__aenter__()
                self.service.show()
                self._started = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        async with self._starting:
            if self._started:
                self._started = False
                await self.service.__aexit__(kind, error, tb)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        kind = KIND_OF_PATH.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if kind is None or not self._enabled:
            await self._app(scope, receive, send)
            return
        held = _Held(self._held)
        try:
            await self._with_facts(kind, held, scope, receive, send)
        finally:
            held.give_back()

    async def _with_facts(self, kind: RequestKind, held: _Held, scope: Scope, receive: Receive, send: Send) -> None:
        body, receive = await self._read(scope, receive, held)
        facts = None if body is None else await self._facts(kind, body, scope)
        if facts is None:
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, kind)
        scope.setdefault("state", {})  # here, so that copies of the scope further in share it
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._finish(facts, answer, scope)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start when the app has started, end when it has ended."""

        async def send_after(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self.__aenter__()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self.__aexit__(None, None, None)
            await send(message)

        await self._app(scope, receive, send_after)

    async def _read(self, scope: Scope, receive: Receive, held: _Held) -> tuple[bytes | None, Receive]:
        """The whole body, and a receive that hands out everything again. None: over a limit, encoded, or cut off."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if headers.get(b"content-encoding", b"identity") != b"identity" or (
            length.isdigit() and int(length) > self._limit_bytes
        ):
            return None, receive
        seen: deque[Message] = deque()
        pieces = Pieces()
        size = 0
        while True:
            message = await receive()
            seen.append(message)
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if message["type"] != "http.request" or size > self._limit_bytes or not held.take(len(piece)):
                return None, _again(seen, receive)
            pieces.append(piece)
            if not message.get("more_body", False):
                body = pieces.joined()
                return body, replay(body, receive)

    async def _facts(self, kind: RequestKind, body: bytes, scope: Scope) -> RequestFacts | None:
        try:
            if not self._started:
                await self.__aenter__()
            session = dict(scope["headers"]).get(self._session_header, b"").decode("latin-1")
            request = await read_body(kind, body, session=session, pace=self._pace)
            if request is None:
                return None
            facts = await self.service.facts_for(request, body, cluster=self._cluster)
        except Exception:
            log.exception("[kvcache] no facts for this request")
            return None
        announce(scope, facts.preferred, header=self._header)
        return facts

    def _finish(self, facts: RequestFacts, answer: _Answer, scope: Scope) -> None:
        served = scope.get("state", {}).get(SERVED_KEY) or answer.endpoint
        try:
            self.service.finished(facts, answer.result(EndpointId(served) if served else None))
        except Exception:
            log.exception("[kvcache] nothing learned from this request")


class _Held:
    """What one request holds of all bodies."""

    __slots__ = ("_all", "_bytes")

    def __init__(self, held: HeldBodies) -> None:
        self._all = held
        self._bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Hold that much more; False when it would be too much for all together."""
        try:
            self._all.take(size_bytes)
        except BodiesFull:
            return False
        self._bytes += size_bytes
        return True

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._all.give_back(self._bytes)
        self._bytes = 0


class _Answer:
    """What the app sends, passed on, with an eye on its head and its end."""

    def __init__(self, send: Send, kind: RequestKind) -> None:
        self._send = send
        self._kind = kind
        self._status = 0
        self._begun = False
        self._first = b""
        self._previous = b""
        self._last = b""
        self.endpoint = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            named = (value.decode("latin-1") for name, value in message.get("headers", ()) if name == _SERVED_HEADER)
            self.endpoint = next(named, "")
        elif message["type"] == "http.response.body" and (body := message.get("body", b"")):
            self._begun = True
            if self._kind is RequestKind.MESSAGES and not self._first:
                self._first = bytes(body[:_KEPT_BYTES])
            self._previous, self._last = self._last, bytes(body[-_KEPT_BYTES:])
        await self._send(message)

    def result(self, endpoint: EndpointId | None) -> Result:
        """How the request went, as far as the answer tells."""
        usage = read_usage(self._previous[-_TAIL_BYTES:] + self._last, self._first)
        return Result(
            endpoint,
            prefilled=self._begun and 200 <= self._status < 300,
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
        )


def _again(seen: deque[Message], receive: Receive) -> Receive:
    """Hands out what was read, in order, and then what comes next."""

    async def receive_again() -> Message:
        return seen.popleft() if seen else await receive()

    return receive_again
