"""`GET /v1/models`: what all clusters together serve, aliases included; and which models metrics may name for it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self

import msgspec
from cachetools import TTLCache
from starlette.types import Scope, Send

from kvproxy.base.background_task import ask_each, in_slices
from kvproxy.base.errors import UpstreamError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.settings import RouteSettings
from kvproxy.proxy.forward.headers import CREDENTIALS, response_headers
from kvproxy.proxy.request.error_reply import local_reply

log = logging.getLogger(__name__)

PATH = "/v1/models"
_TIMEOUTS = Timeouts(connect_s=1.0, first_byte_s=2.0, idle_s=2.0)
#: Bounds of one engine's list, and on its objects and lists together (a model has three).
_MAX_LIST_BYTES = 1024 * 1024
_MAX_LIST_VALUES = 20_000
#: How long a list is reused, so that a busy client does not multiply into every engine.
_FRESH_S = 2.0
#: Engines asked at once: those that do not answer hold up the others of a larger fleet for the time of an answer.
MAX_ASKED = 1024
#: Clients whose own lists are kept meanwhile.
_MAX_CLIENTS = 256
_REFUSALS = frozenset({401, 403})
#: Paths that change which adapters an engine lists.
ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

#: Bounds on models that only engines name, for metrics, and on the length of a name.
MAX_LISTED = 50
MAX_NAME = 200
#: Delay from a request for an unknown model to the next query of the engines, and least pause between these.
DELAY_S = 1.0
AGAIN_S = 60.0
#: Interval of queries to engines with adapters, which are loaded and unloaded at run time.
FOLLOW_S = 30.0

Row = dict[str, Any]


def is_asked_for(scope: Scope) -> bool:
    """Return True for `GET /v1/models` and `/v1/models/NAME`."""
    return scope["method"] == "GET" and scope["path"][len(PATH) :][:1] in ("", "/")


class _ModelList(msgspec.Struct):
    data: list[Row]


class _Listed(msgspec.Struct, gc=False):
    """One engine's answer: its models, or its refusal of the credential it got; neither if it did not answer."""

    rows: list[Row] = []
    status: int = 0
    headers: Headers = []
    body: bytes = b""


class _Merged(msgspec.Struct, gc=False):
    """Models by name, the engines that refused the credential they got, and the answer of one of them."""

    rows: dict[str, Row]
    closed: list[Engine] = []
    refusal: _Listed | None = None


_NOTHING = _Merged({})


class ModelList:
    """Merges the engines' own lists; an engine that does not answer is left out, never waited for.

    An engine without a key in the configuration that refuses a nameless request is asked again with the client's own
    credential, and its models are shown to that client alone.
    """

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
        self._open = _NOTHING  # lists that engines return without a client's credential
        self._fresh_until = float("-inf")
        self._asking: asyncio.Task[_Merged] | None = None
        self._by_client: TTLCache[bytes, _Merged] = TTLCache(_MAX_CLIENTS, _FRESH_S, timer=clock)

    async def answer(self, scope: Scope, send: Send) -> None:
        """Send the list, or one model of it (`/v1/models/NAME`); 404 for an unknown one, the engines' own 401 or 403
        if all that answered refused the client, 503 when none answered."""
        listed = await self._list_for(scope["headers"])
        rows = listed.rows
        refusal = listed.refusal
        wanted = scope["path"][len(PATH) + 1 :]
        if not rows and refusal is not None:
            await _send(send, refusal.status, refusal.headers, refusal.body)
        elif not rows:
            message = "No engine answered for its models."
            await local_reply(
                scope,
                send,
                status=503,
                reason="no_endpoints",
                message=message,
                metrics=self._metrics,
                headers=[(b"retry-after", b"1")],
            )
        elif not wanted:
            await _send_json(send, {"object": "list", "data": list(rows.values())})
        elif wanted in rows:
            await _send_json(send, rows[wanted])
        else:
            message = f"The model `{wanted[:200]}` does not exist."
            await local_reply(scope, send, status=404, reason="unknown_model", message=message, metrics=self._metrics)

    async def names(self) -> list[str]:
        """Of all models there are, aliases included; none when no engine answered."""
        return list((await self._current()).rows)

    def forget(self) -> None:
        """Ask the engines again at the next request: an adapter was loaded or unloaded."""
        self._fresh_until = float("-inf")
        self._by_client.clear()

    async def _list_for(self, headers: Headers) -> _Merged:
        """Return what this client may see."""
        listed = await self._current()
        credentials = [pair for pair in headers if pair[0] in CREDENTIALS]
        if not (listed.closed and credentials):
            return listed
        key = hashlib.sha256(b"\0".join(map(b": ".join, credentials))).digest()
        own = self._by_client.get(key)
        if own is None:
            own = self._by_client[key] = await self._ask_closed(listed, credentials)
        return own

    async def _ask_closed(self, listed: _Merged, credentials: Headers) -> _Merged:
        answers = await self._ask_engines(listed.closed, credentials)
        rows = dict(listed.rows)
        for row in (row for answer in answers for row in answer.rows):
            rows.setdefault(str(row.get("id", "")), row)
        self._add_aliases(rows)
        return _Merged(rows, refusal=_first_refusal(answers))

    async def _current(self) -> _Merged:
        """Return the merged rows, asked for once however many clients want them."""
        if self._clock() < self._fresh_until:
            return self._open
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="list models")
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[_Merged]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is None:
            self._open = task.result()
            answered = self._open.rows or self._open.closed
            self._fresh_until = self._clock() + (_FRESH_S if answered else 0.0)

    def has_adapters(self) -> bool:
        """Return True if some engine listed an adapter."""
        return any(cluster.adapters.names for cluster in self._clusters)

    async def _ask_all(self) -> _Merged:
        engines = [(cluster, engine) for cluster in self._clusters for engine in cluster.engines]
        answers = await self._ask_engines([engine for _, engine in engines], [])
        rows: dict[str, Row] = {}
        closed = []
        async for (cluster, engine), answer in in_slices(zip(engines, answers, strict=True)):
            if answer.rows:  # otherwise it did not answer, and its last list stays in use
                names = [str(row.get("id", "")) for row in answer.rows if row.get("parent")]
                cluster.adapters.observe_list(str(engine.id), engine.adapters, listed=names)
            elif answer.status and engine.authorization is None:
                closed.append(engine)
            for row in answer.rows:
                rows.setdefault(str(row.get("id", "")), row)
        self._add_aliases(rows)
        return _Merged(rows, closed, _first_refusal(answers))

    async def _ask_engines(self, engines: Sequence[Engine], credentials: Headers) -> list[_Listed]:
        outcomes = await ask_each(engines, lambda engine: self._ask(engine, credentials), at_once=MAX_ASKED)
        for broken in (one for one in outcomes if isinstance(one, Exception)):
            raise broken
        return [one for one in outcomes if isinstance(one, _Listed)]

    def _add_aliases(self, rows: dict[str, Row]) -> None:
        for route in self._aliases:
            target = rows.get(route.upstream_model)
            if target is not None:
                rows.setdefault(route.model, target | {"id": route.model, "root": route.upstream_model})
        rows.pop("", None)

    async def _ask(self, engine: Engine, credentials: Headers) -> _Listed:
        headers = [*self._headers, *credentials]
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
        except UpstreamError:
            return _Listed()
        if response.status in _REFUSALS:
            own = response_headers(response.headers, endpoint=str(engine.id).encode(), origin=engine.origin)
            return _Listed(status=response.status, headers=own, body=body)
        return _Listed(_rows(body)) if response.status == 200 else _Listed()


def _first_refusal(answers: Iterable[_Listed]) -> _Listed | None:
    return next((answer for answer in answers if answer.status), None)


def _rows(body: bytes) -> list[Row]:
    """Return an engine's models; none in what cannot be read, or not quickly."""
    if body.count(b"{") + body.count(b"[") > _MAX_LIST_VALUES:
        return []
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


async def _send_json(send: Send, value: object) -> None:
    body = msgspec.json.encode(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await _send(send, 200, headers, body)


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
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
        """Return True if some engine listed the model in its last answer. An unlisted model causes a new query,
        later."""
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
        if names:  # otherwise no engine answered, and the last lists stay in use
            self._listed = frozenset(sorted(names, key=lambda name: (name not in self._listed, name))[:MAX_LISTED])
        if self._change():
            self._ask_after(self._follow_s)
