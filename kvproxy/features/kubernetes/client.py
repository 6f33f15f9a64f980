"""The Kubernetes API, as far as discovery needs it: list and watch of one collection, as a service account.

Two GETs on httpx, because a library would bring a second HTTP stack (kubernetes_asyncio) or models of the whole API
(lightkube), and still leave the bounds, the relist and the pauses between attempts to us.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

import httpx
import msgspec

from kvproxy.base.errors import BadResponse, ClientError, ClientUnavailable, DiscoveryError, Refused
from kvproxy.base.timed_thread import TimedThread
from kvproxy.cache.clients.api import query_string
from kvproxy.cache.clients.line_stream import StreamApi
from kvproxy.cluster.sources.entries import LeftOut
from kvproxy.cluster.sources.watched import MAX_ITEMS, Changes, Listing, TooOld, check_count

#: Credentials of a pod for the API.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_PAGE = 100
#: Of a list that is kept, were each a quarter full.
_MAX_PAGES = 4 * MAX_ITEMS // _PAGE
_MAX_PAGE_BYTES = 8 << 20
_MAX_PAGE_VALUES = 100_000
#: The API server stores no object over 1.5 MiB.
_MAX_LINE_BYTES = 4 << 20
_LIST_TIMEOUT_S = 5.0
#: Bound on reading files of a pod's credentials.
FILES_S = 5.0
#: A watch is restarted after about this long, to notice a connection whose other end vanished.
_WATCH_S = (45, 75)
_IDLE_S = 90.0
_GONE = 410

ObjectT = TypeVar("ObjectT", bound="KubernetesObject")


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata of every object."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    deletion_timestamp: str | None = None
    continued: str = msgspec.field(name="continue", default="")


class KubernetesObject(msgspec.Struct, frozen=True):
    """An object of some collection."""

    metadata: Metadata


class _Page(msgspec.Struct):
    metadata: Metadata
    items: list[msgspec.Raw]  # an answer without is no list, and not an empty one


class _Named(msgspec.Struct):
    name: str = ""


class _Object(msgspec.Struct):
    """Parsed part of an invalid object."""

    metadata: _Named


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """How to reach the API: its address, and files with the token and the authority of its certificate ("": none)."""

    url: str
    token_file: str = ""
    ca_file: str = ""

    @classmethod
    def in_cluster(cls, env: Mapping[str, str], *, folder: Path = SERVICE_ACCOUNT) -> KubernetesAccess:
        """As every pod is given it."""
        host = env.get("KUBERNETES_SERVICE_HOST", "")
        port = env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise DiscoveryError("KUBERNETES_SERVICE_HOST is not set: outside of a cluster name the API in `api.url`")
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", str(folder / "token"), str(folder / "ca.crt"))

    @asynccontextmanager
    async def connect(self, thread: TimedThread) -> AsyncIterator[StreamApi]:
        """Yield a connection of its own; the files are read again for each, since tokens are replaced every hour."""
        try:
            token, verify = await thread.call(self._read, timeout_s=FILES_S)
        except (OSError, ssl.SSLError) as error:
            why = str(error) or f"no answer within {FILES_S:g} s"
            raise DiscoveryError(f"the credentials for the Kubernetes API cannot be read: {why}") from error
        async with httpx.AsyncClient(verify=verify, trust_env=False) as http:
            authorization = f"Bearer {token}" if token else None
            yield StreamApi(http, self.url, service="the Kubernetes API", authorization=authorization)

    def _read(self) -> tuple[str, ssl.SSLContext | bool]:
        token = Path(self.token_file).read_text(encoding="ascii", errors="replace").strip() if self.token_file else ""
        if self.token_file and not token:
            raise OSError(f"{self.token_file} is empty")
        verify = ssl.create_default_context(cafile=self.ca_file or None) if self.url.startswith("https:") else False
        return token, verify


class Collection(Generic[ObjectT]):
    """Objects of one kind in one namespace, those with the labels; by name."""

    def __init__(
        self,
        access: KubernetesAccess,
        path: str,
        kind: type[ObjectT],
        *,
        selector: str,
        namespace: str,
        rng: Random,
    ) -> None:
        self._access = access
        group, self._resource = path.rsplit("/", 1)
        self._namespace = namespace
        self._path = f"{group}/namespaces/{namespace}/{self._resource}"
        self._decoder = msgspec.json.Decoder(kind)
        self._selector = selector
        self._rng = rng
        self._files = TimedThread("Kubernetes credentials")

    async def list_all(self) -> Listing[ObjectT | LeftOut]:
        """All of them, page by page."""
        found: dict[str, ObjectT | LeftOut] = {}
        page = _Page(Metadata(), [])
        async with self._access.connect(self._files) as api:
            for _ in range(_MAX_PAGES):
                page = await self._page(api, page.metadata.continued)
                found.update(map(self._read, page.items))
                check_count(len(found), f"{self._resource} in namespace {self._namespace}")
                if not page.metadata.continued:
                    return Listing(found, page.metadata.resource_version)
        raise BadResponse(f"{self._resource}: the list does not end after {_MAX_PAGES} pages")

    async def watch(self, version: str) -> AsyncGenerator[Changes[ObjectT | LeftOut]]:
        """Yield what changed since, as it does; without changes once it has begun."""
        query = query_string(
            {
                "labelSelector": self._selector,
                "watch": "true",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": self._rng.randint(*_WATCH_S),
            }
        )
        async with self._access.connect(self._files) as api:
            stream = api.stream_lines(
                "GET", self._path + query, timeout_s=_LIST_TIMEOUT_S, idle_s=_IDLE_S, max_line_bytes=_MAX_LINE_BYTES
            )
            async with aclosing(stream) as batches:
                try:
                    async for lines in batches:
                        yield self._changes(lines)
                except Refused as error:
                    raise self._explained(error) from error

    async def _page(self, api: StreamApi, continued: str) -> _Page:
        query = query_string({"labelSelector": self._selector, "limit": _PAGE, "continue": continued})
        try:
            raw = await api.call("GET", self._path + query, timeout_s=_LIST_TIMEOUT_S, max_bytes=_MAX_PAGE_BYTES)
        except Refused as error:
            raise self._explained(error) from error
        return api.decode(raw, _Page, self._path, max_values=_MAX_PAGE_VALUES)

    def _explained(self, error: Refused) -> ClientError | TooOld:
        """With what to do about it."""
        if error.status == _GONE:
            return TooOld()
        if error.status in (401, 403):
            where = f"{self._resource} in namespace {self._namespace}"
            what = (
                "takes no such token"
                if error.status == 401
                else f"does not let this account get, list and watch {where}"
            )
            said = str(error).partition(f": {error.status} ")[2]
            return Refused(f"the Kubernetes API {what} ({error.status}{said and ': '}{said})", status=error.status)
        return error

    def _changes(self, lines: Sequence[bytes]) -> Changes[ObjectT | LeftOut]:
        changed: dict[str, ObjectT | LeftOut | None] = {}
        version = ""
        for line in lines:
            event = self._event(line)
            name, one = self._read(event.object)
            if isinstance(one, LeftOut) and not name:
                raise BadResponse(one.why)
            version = (not isinstance(one, LeftOut) and one.metadata.resource_version) or version
            if event.type != "BOOKMARK":
                changed[name] = None if event.type == "DELETED" else one
        return Changes(changed, version)

    def _event(self, line: bytes) -> _Event:
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type != "ERROR":
                return event
            status = msgspec.json.decode(event.object, type=_Status)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadResponse(f"a watch of {self._resource} brought an invalid event") from error
        if status.code == _GONE:
            raise TooOld
        raise ClientUnavailable(f"the watch of {self._resource} ended with {status.code}: {status.message[:200]}")

    def _read(self, raw: msgspec.Raw) -> tuple[str, ObjectT | LeftOut]:
        """Return an object with its name; one that cannot be read is left out alone, and may have none."""
        try:
            one = self._decode(raw)
        except BadResponse as error:
            name = ""
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                name = msgspec.json.decode(raw, type=_Object).metadata.name
            return name, LeftOut(f"{self._resource} {name or 'without a name'}", str(error))
        return one.metadata.name, one

    def _decode(self, raw: msgspec.Raw) -> ObjectT:
        try:
            one = self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadResponse(f"{self._resource}: {str(error)[:120]}") from error
        if not one.metadata.name and not one.metadata.resource_version:
            raise BadResponse(f"{self._resource}: one without a name")
        return one
