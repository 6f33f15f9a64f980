"""One call to every engine of a cluster with one answer, and caches that count as empty from now on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.base.background_task import ask_each
from kvproxy.base.errors import ClientError, NotSupported, Problem
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.api import Api
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.engine import Engine
from kvproxy.features.rollouts.times import CALL_S, MAX_CALL_S
from kvproxy.operate.admin.clusters import find_cluster
from kvproxy.operate.admin.replies import REPEATED, Audit, RequestRefused, read_json_object, read_number, reply_json
from kvproxy.operate.runtime.operated import AdminTarget

#: Engines called at the same time.
AT_ONCE = 64
#: Most of an engine's answer that is passed on.
MAX_ANSWER_BYTES = 4096
_MAX_PATH = 1024

FieldsT = TypeVar("FieldsT", bound="Flush")


class Flush(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /flush`: the engines of a cluster, all by default."""

    cluster: str | None = None  # may be left out where there is one
    engines: list[str] | None = None
    weight_version: str | None = None  # engines that report another one keep their caches


class Call(Flush, forbid_unknown_fields=True):
    """Body of `POST /call`."""

    path: str = ""
    method: Literal["GET", "POST", "PUT", "DELETE"] = "POST"
    body: Any = None  # sent as JSON; None: no body
    flush: bool = False  # the caches of engines that did it are empty


class RolloutRoutes:
    """With several processes `/call` is made by one of them, `/flush` by all."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/call", self._call, methods=["POST"]), Route("/flush", self._flush, methods=["POST"])]

    async def _flush(self, request: Request) -> Response:
        asked = await _read(request, Flush)
        service, cluster, engines = self._find(asked)
        kept = await _find_kept(service, engines, asked.weight_version)
        flushed = _forget(service, cluster, [one for one in engines if one.id not in kept])
        self._audit.write_line(request, "flush", cluster=cluster.name, endpoints=len(flushed))
        return reply_json({"cluster": cluster.name, "flushed": flushed, **({"kept": kept} if kept else {})})

    async def _call(self, request: Request) -> Response:
        asked = await _read(request, Call)
        timeout_s = read_number(request, default=CALL_S, most=MAX_CALL_S, name="timeout_s")
        if fault := _path_fault(asked.path):
            raise RequestRefused(422, Problem("path", fault, "a path of the engines' API, such as /pause"))
        if asked.weight_version is not None and not asked.flush:
            raise RequestRefused(422, Problem("weight_version", "nothing is flushed", "`flush: true` as well"))
        service, cluster, engines = self._find(asked)
        answers: dict[str, dict[str, object]] = {}
        turns = asyncio.Semaphore(AT_ONCE)

        async def call_one(engine: Engine) -> None:
            async with turns:
                answers[engine.id] = await _call_engine(service, engine, asked, timeout_s)

        if not request.scope.get(REPEATED):  # another process of this proxy has called them
            await asyncio.gather(*(call_one(engine) for engine in engines))
        failed = [engine.id for engine in engines if not answers.get(engine.id, {"ok": True})["ok"]]
        kept: dict[str, str] = {}
        if asked.flush:
            done = [engine for engine in engines if engine.id not in failed]
            kept = await _find_kept(service, done, asked.weight_version)
            _forget(service, cluster, [engine for engine in done if engine.id not in kept])
        path = asked.path.partition("?")[0]  # a query may hold a secret
        said = {"cluster": cluster.name, "method": asked.method, "path": path, "flush": asked.flush}
        self._audit.write_line(request, "call", **said, engines=len(engines), failed=len(failed))
        shown = {
            "cluster": cluster.name,
            "failed": failed,
            "engines": {name: answers[name] for name in sorted(answers)},
            **({"kept": kept} if kept else {}),
        }
        return reply_json(shown, 502 if failed else 200)

    def _find(self, asked: Flush) -> tuple[KvCache, Cluster, Sequence[Engine]]:
        service = self._operated.kvcache
        if service is None:
            raise RequestRefused(409, Problem("filters", "needs the kvcache filter", "add kvcache to the chain"))
        cluster = find_cluster(self._operated.clusters, asked.cluster)
        if asked.engines is None:
            return service, cluster, cluster.engines
        found: dict[Engine, None] = {}
        for name in asked.engines:
            endpoints = cluster.members.find_named(EndpointId(name))
            if not endpoints:
                what = f"{cluster.name} has no endpoint {name[:128]!r}"
                raise RequestRefused(404, Problem("engines", what, "GET /endpoints shows them"))
            found.update(dict.fromkeys(endpoint.engine for endpoint in endpoints))
        return service, cluster, [*found]


async def _read(request: Request, kind: type[FieldsT]) -> FieldsT:
    data = await read_json_object(request, optional=True)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as wrong:
        known = ", ".join(kind.__struct_fields__)
        raise RequestRefused(422, Problem("(body)", str(wrong), f"known: {known}")) from None


def _path_fault(path: str) -> str:
    if not path:
        return "required"
    if not path.startswith("/") or path.startswith("//"):
        return "must begin with one /"
    if len(path) > _MAX_PATH or not (path.isascii() and path.isprintable()) or " " in path or "#" in path:
        return "is no path of a URL"
    return ""


async def _call_engine(service: KvCache, engine: Engine, asked: Call, timeout_s: int) -> dict[str, object]:
    body = None if asked.body is None else msgspec.json.encode(asked.body)
    try:
        answer = await service.engines.client(engine).api.call(asked.method, asked.path, timeout_s=timeout_s, body=body)
    except ClientError as error:
        return {"ok": False, "error": str(error)}
    return {"ok": True, "answer": _shown(answer)}


def _shown(answer: bytes) -> Any:
    """Return the JSON of an answer, or else its text, shortened."""
    if len(answer) <= MAX_ANSWER_BYTES:
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return answer[:MAX_ANSWER_BYTES].decode("utf-8", "replace")


async def _find_kept(service: KvCache, engines: Sequence[Engine], version: str | None) -> dict[str, str]:
    """Return the engines that report other weights than this version, with theirs; none where no version is given."""
    kept: dict[str, str] = {}

    async def ask(engine: Engine) -> None:
        with contextlib.suppress(ClientError):  # it reports none, and is taken to have the new ones
            api = service.engines.client(engine).api
            reported = await _fetch_weight_version(api, timeout_s=service.settings.request_timeout)
            if reported != version:
                kept[engine.id] = reported

    if version is not None:
        await ask_each(engines, ask, at_once=AT_ONCE)
    return kept


class _Weights(msgspec.Struct):
    weight_version: str


async def _fetch_weight_version(api: Api, *, timeout_s: float) -> str:
    """Return the name of the weights in use, as a trainer gave it: vLLM has a path for it, SGLang's model shows it."""
    try:
        answer = await api.get("/weight_info", _Weights, timeout_s=timeout_s)
    except NotSupported:
        answer = await api.get("/model_info", _Weights, timeout_s=timeout_s)
    return answer.weight_version


def _forget(service: KvCache, cluster: Cluster, engines: Sequence[Engine]) -> list[str]:
    """Let the caches of these engines count as empty. Returns their endpoints."""
    endpoints = [endpoint for engine in engines for endpoint in cluster.members.of_engine(engine)]
    for endpoint in endpoints:
        service.overlap.indexes[cluster.name].forget_cache(endpoint.id)
        service.state.losses.note_loss(cluster.name, endpoint.id, LossReason.CLEARED)
    return [str(endpoint.id) for endpoint in endpoints]
