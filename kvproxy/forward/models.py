"""`GET /v1/models`: what all clusters together serve, aliases included; and which models metrics may name for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self

import msgspec
from starlette.types import Scope, Send

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.engine import Engine
from kvproxy.config.schema import RouteSettings
from kvproxy.errors import UpstreamError
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.error_reply import local_reply
from kvproxy.types import Clock
from kvproxy.upstream.pool import Timeouts, UpstreamPool

log = logging.getLogger(__name__)

PATH = "/v1/models"
_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=2.0, idle_s=2.0)
#: Of one engine's list, and its objects and lists together (a model has three).
_MAX_LIST_BYTES, _MAX_LIST_VALUES = 1024 * 1024, 20_000
#: A list is answered from memory for this long, so that a busy client does not multiply into every engine.
_FRESH_S = 2.0

#: Models told apart by metrics although no configuration names them, and the longest name of one.
MAX_LISTED, MAX_NAME = 50, 200
#: The engines are asked so long after a request for a model that is not known, and not again before that much later.
DELAY_S, AGAIN_S = 1.0, 60.0
#: Engines that have adapters are asked again after so long: adapters are loaded and unloaded while they run.
FOLLOW_S = 30.0

Row = dict[str, Any]


def is_asked_for(scope: Scope) -> bool:
    """Whether this is `GET /v1/models`, or `/v1/models/NAME`."""
    return scope["method"] == "GET" and scope["path"][len(PATH) :][:1] in ("", "/")


class _ModelList(msgspec.Struct):
    data: list[Row]


class ModelList:
    """Merges the engines' own lists; an engine that does not answer is left out, never waited for."""

    def __init__(
        self,
        clusters: Sequence[Cluster],
        routes: Sequence[RouteSettings],
        *,
        pool: UpstreamPool,
        metrics: Metrics,
        clock: Clock,
        via: bytes = b"",
    ) -> None:
        self._clusters = clusters
        self._headers = [(b"accept", b"application/json"), *([(b"via", via)] if via else ())]
        self._aliases = [route for route in routes if route.upstream_model and not route.model.endswith("*")]
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._rows: dict[str, Row] = {}
        self._fresh_until = float("-inf")
        self._asking: asyncio.Task[dict[str, Row]] | None = None

    async def answer(self, scope: Scope, send: Send) -> None:
        """The list, or one model of it (`/v1/models/NAME`); 404 for an unknown one, 503 when no engine answered."""
        rows = await self._current()
        wanted = scope["path"][len(PATH) + 1 :]
        if not rows:
            message = "No engine answered for its models."
            await local_reply(scope, send, status=503, reason="no_endpoint", message=message, metrics=self._metrics)
        elif not wanted:
            await _send_json(send, {"object": "list", "data": list(rows.values())})
        elif wanted in rows:
            await _send_json(send, rows[wanted])
        else:
            message = f"The model `{wanted[:200]}` does not exist."
            await local_reply(scope, send, status=404, reason="unknown_model", message=message, metrics=self._metrics)

    async def names(self) -> list[str]:
        """Of all models there are, aliases included; none when no engine answered."""
        return list(await self._current())

    async def _current(self) -> dict[str, Row]:
        """The merged rows, asked for once however many clients want them."""
        if self._clock() < self._fresh_until:
            return self._rows
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="list models")
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[dict[str, Row]]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is None:
            self._rows = task.result()
            self._fresh_until = self._clock() + (_FRESH_S if self._rows else 0.0)

    def has_adapters(self) -> bool:
        """Whether some engine listed one."""
        return any(cluster.adapters.names for cluster in self._clusters)

    async def _ask_all(self) -> dict[str, Row]:
        engines = [(cluster, engine) for cluster in self._clusters for engine in cluster.engines]
        lists = await asyncio.gather(*(self._ask(engine) for _, engine in engines))
        rows: dict[str, Row] = {}
        for (cluster, engine), listed in zip(engines, lists, strict=True):
            if listed:  # otherwise it did not answer, and what was known goes on
                names = [str(row.get("id", "")) for row in listed if row.get("parent")]
                cluster.adapters.observe_list(str(engine.id), engine.adapters, listed=names)
            for row in listed:
                rows.setdefault(str(row.get("id", "")), row)
        for route in self._aliases:
            target = rows.get(route.upstream_model)
            if target is not None:
                rows.setdefault(route.model, target | {"id": route.model, "root": route.upstream_model})
        rows.pop("", None)
        return rows

    async def _ask(self, engine: Engine) -> list[Row]:
        headers = list(self._headers)
        if engine.authorization is not None:
            headers.append((b"authorization", engine.authorization))
        try:
            response = await self._pool.request(engine.origin, b"GET", PATH.encode(), headers, None, timeouts=_TIMEOUTS)
            try:
                body = b""
                while len(body) <= _MAX_LIST_BYTES and (chunk := await response.next_chunk()):
                    body += chunk
            finally:
                response.abort()
            return _rows(body) if response.status == 200 else []
        except UpstreamError:
            return []


def _rows(body: bytes) -> list[Row]:
    """An engine's models; none in what cannot be read, or not quickly."""
    if body.count(b"{") + body.count(b"[") > _MAX_LIST_VALUES:
        return []
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


async def _send_json(send: Send, value: object) -> None:
    body = msgspec.json.encode(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ServedModels:
    """Entered, it asks the engines (`ask`: the names they list) when a client names a model that is not known; clients
    cannot make it ask more than once a minute, and what engines do not list stays unknown. While they `change`, it asks
    again and again."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Iterable[str]]],
        *,
        clock: Clock,
        change: Callable[[], bool] = lambda: False,
        delay_s: float = DELAY_S,
        follow_s: float = FOLLOW_S,
    ) -> None:
        self._ask = ask
        self._change = change
        self._follow_s = follow_s
        self._clock = clock
        self._delay_s = delay_s
        self._listed: frozenset[str] = frozenset()
        self._again_at = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def serves(self, model: str) -> bool:
        """Whether some engine listed it when they were asked last. A model that none did has them asked, later."""
        if model in self._listed:
            return True
        if self._loop is not None and (now := self._clock()) >= self._again_at:
            self._again_at = now + AGAIN_S
            self._ask_after(self._delay_s)
        return False

    def _ask_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._timer = self._loop.call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._asking = asyncio.create_task(self._look(), name="list served models")

    async def _look(self) -> None:
        try:
            names = {name for name in await self._ask() if 0 < len(name) <= MAX_NAME}
        except Exception:
            log.exception("the engines' lists of models cannot be read")
            names = set()
        if names:  # otherwise no engine answered, and what was known goes on
            self._listed = frozenset(sorted(names, key=lambda name: (name not in self._listed, name))[:MAX_LISTED])
        if self._change():
            self._ask_after(self._follow_s)
