"""An API server of Kubernetes, as far as discovery asks it: lists in pages, watches, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

Object = dict[str, Any]

PODS, SLICES = "pods", "endpointslices"


class FakeKubernetes:
    """ASGI app. Objects are put and deleted by the test, and watchers hear of it; `lists` and `watches` hold the
    queries that came. `refuse` answers everything with an error, `raw_...` with these bytes, and `hang` never."""

    def __init__(self) -> None:
        self.version = 100
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.token = ""  # required, where there is one
        self.refuse: tuple[int, str] | None = None
        self.forbid = frozenset[str]()  # verbs
        self.raw_list: bytes | None = None
        self.raw_watch: bytes | None = None
        self.hang = False
        self.page = 500  # larger pages are cut down to this
        self.replicas: dict[str, int] = {}  # by the path of a workload
        self.puts: list[Object] = []  # scales that were set
        self.conflict = False  # another is faster to change a scale
        self._objects: dict[str, dict[str, Object]] = {PODS: {}, SLICES: {}}
        self._log: list[tuple[int, str, str, Object]] = []
        self._oldest = 0  # watches from before this version are gone
        self._open: dict[str, list[asyncio.Queue[bytes | None]]] = defaultdict(list)

    @property
    def watching(self) -> int:
        """Watches that are open."""
        return sum(map(len, self._open.values()))

    def put(self, resource: str, one: Object) -> None:
        """Create or replace an object."""
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self._objects[resource] else "ADDED"
        self.version += 1
        one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        self._objects[resource][name] = one
        self._say(resource, kind, one)

    def delete(self, resource: str, name: str) -> None:
        """Take an object away."""
        self.version += 1
        one = self._objects[resource].pop(name)
        self._say(resource, "DELETED", {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}})

    def bookmark(self) -> None:
        """Tell all watchers how far they are."""
        for resource, queues in self._open.items():
            one = {"kind": resource, "metadata": {"resourceVersion": str(self.version)}}
            for queue in queues:
                queue.put_nowait(_line("BOOKMARK", one))

    def compact(self) -> None:
        """Forget what changed until now."""
        self._oldest = self.version
        self._log.clear()

    def say_gone(self) -> None:
        """End open watches as the server does whose cache was overrun: 410 within the stream."""
        for queues in self._open.values():
            for queue in queues:
                queue.put_nowait(_line("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"}))
                queue.put_nowait(b"")

    def send(self, raw: bytes) -> None:
        """Bytes into every open watch."""
        for queues in self._open.values():
            for queue in queues:
                queue.put_nowait(raw)

    def drop(self, *, half: bytes = b"") -> None:
        """Cut open watches off, in the middle of a line."""
        for queues in self._open.values():
            for queue in queues:
                if half:
                    queue.put_nowait(half)
                queue.put_nowait(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        query = {key: values[0] for key, values in parse_qs(scope["query_string"].decode()).items()}
        resource = scope["path"].rsplit("/", 1)[-1]
        token = dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
        self.tokens.append(token)
        query["namespace"] = scope["path"].split("/namespaces/")[1].split("/")[0]
        if resource == "scale":
            await self._scale(scope, receive, send, token)
            return
        (self.watches if "watch" in query else self.lists).append(query)
        if self.hang:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        refused = self._why_refused(resource, query, token)
        if refused is not None:
            await _answer(send, refused[0], _status(*refused))
        elif "watch" in query:
            await self._watch(resource, query, receive, send)
        else:
            await _answer(send, 200, self.raw_list or self._list(resource, query))

    async def _scale(self, scope: Scope, receive: Receive, send: Send, token: str) -> None:
        workload = scope["path"].split("/namespaces/")[1].removesuffix("/scale")
        refused = self._why_refused("scale", {}, token)
        if refused is None and workload not in self.replicas:
            refused = 404, f"{workload} not found"
        if refused is None and scope["method"] == "PUT" and self.conflict:
            refused = 409, "the object has been modified"
        if refused is not None:
            await _answer(send, refused[0], _status(*refused))
            return
        if scope["method"] == "PUT":
            put = json.loads((await receive())["body"])
            self.puts.append(put)
            self.replicas[workload] = put["spec"]["replicas"]
        replicas = self.replicas[workload]
        metadata = {"name": workload.rsplit("/", 1)[1], "resourceVersion": str(self.version)}
        spec = {"replicas": replicas} if replicas else {}  # zero is left out, as Go's `omitempty` has it
        one = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec}
        await _answer(send, 200, json.dumps({**one, "status": {"replicas": replicas}}).encode())

    def _why_refused(self, resource: str, query: dict[str, str], token: str) -> tuple[int, str] | None:
        if ("watch" if "watch" in query else "list") in self.forbid:
            return 403, f"{resource} is forbidden"
        return self.refuse or ((401, "Unauthorized") if self.token and token != self.token else None)

    def _list(self, resource: str, query: dict[str, str]) -> bytes:
        found = [one for one in self._objects[resource].values() if _selected(one, query)]
        start, size = int(query.get("continue", 0)), min(int(query.get("limit", 500)), self.page)
        more = {"continue": str(start + size)} if start + size < len(found) else {}
        metadata = {"resourceVersion": str(self.version), **more}
        return json.dumps({"kind": "List", "metadata": metadata, "items": found[start : start + size]}).encode()

    async def _watch(self, resource: str, query: dict[str, str], receive: Receive, send: Send) -> None:
        since = int(query["resourceVersion"])
        if since < self._oldest:
            await _answer(send, 200, _line("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
            return
        if self.raw_watch is not None:
            await _answer(send, 200, self.raw_watch)
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, of, kind, one in self._log:
            if version > since and of == resource and _selected(one, query):
                queue.put_nowait(_line(kind, one))
        self._open[resource].append(queue)
        leaving = asyncio.create_task(_left(receive, queue))
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            while piece := await queue.get():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if piece is None:
                raise ConnectionResetError("dropped")
            await send({"type": "http.response.body", "body": b""})
        finally:
            leaving.cancel()
            self._open[resource].remove(queue)

    def _say(self, resource: str, kind: str, one: Object) -> None:
        self._log.append((self.version, resource, kind, one))
        for queue in self._open[resource]:
            queue.put_nowait(_line(kind, one))


async def _left(receive: Receive, queue: asyncio.Queue[bytes | None]) -> None:
    """Wait until the watcher leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(b"")


def _selected(one: Object, query: dict[str, str]) -> bool:
    labels = one["metadata"].get("labels", {})
    wanted = [term.split("=", 1) for term in query.get("labelSelector", "").split(",") if term]
    return all(labels.get(key) == value for key, value in wanted)


def _line(kind: str, one: Object) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def _status(code: int, message: str) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": code}).encode()


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


def pod(
    name: str,
    ip: str,
    *,
    ready: bool = True,
    deleted: bool = False,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ports: tuple[tuple[str, int], ...] = (("http", 8000),),
) -> Object:
    """Return a pod with one container."""
    metadata: Object = {"name": name, "labels": {"app": "vllm", **(labels or {})}, "annotations": annotations or {}}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "metadata": metadata,
        "spec": {
            "nodeName": "n1",
            "containers": [{"ports": [{"name": each, "containerPort": number} for each, number in ports]}],
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def slice_of(
    name: str,
    *endpoints: Object,
    service: str = "vllm",
    family: str = "IPv4",
    ports: tuple[tuple[str, int], ...] = (("http", 8000),),
    labels: dict[str, str] | None = None,
) -> Object:
    """Return an EndpointSlice."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service, **(labels or {})}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": each, "port": number, "protocol": "TCP"} for each, number in ports],
    }


def member(name: str, address: str, **conditions: bool | None) -> Object:
    """One endpoint of a slice: a pod with its conditions."""
    given = {"ready": True, "serving": True, "terminating": False, **conditions}
    return {
        "addresses": [address],
        "conditions": {key: value for key, value in given.items() if value is not None},
        "targetRef": {"kind": "Pod", "name": name},
        "nodeName": "n1",
        "zone": "z1",
    }
