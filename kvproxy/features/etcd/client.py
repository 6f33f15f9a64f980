"""etcd over its JSON gateway: the keys below a prefix, listed and watched."""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import httpx
import msgspec

from kvproxy.base.errors import BadResponse, ClientUnavailable, DiscoveryError, Refused
from kvproxy.base.timed_thread import TimedThread
from kvproxy.cache.clients.line_stream import StreamApi
from kvproxy.cluster.sources.watched import Changes, Listing, TooOld, check_count

_PAGE = 1000
_MAX_PAGE_BYTES = 16 << 20
_MAX_LINE_BYTES = 16 << 20
_TIMEOUT_S = 4.0
#: etcd sends no messages without changes: a watch is restarted after this long.
_IDLE_S = 60.0
#: Digits of 64 bits.
_LONGEST_REVISION = 20


class _Header(msgspec.Struct):
    revision: str = "0"


class _KeyValue(msgspec.Struct):
    key: str
    value: str = ""


class _Range(msgspec.Struct):
    header: _Header
    kvs: list[_KeyValue] = []
    more: bool = False


class _Event(msgspec.Struct):
    kv: _KeyValue
    type: str = "PUT"


class _Result(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    events: list[_Event] = []
    canceled: bool = False
    compact_revision: str = "0"
    cancel_reason: str = ""


class _Error(msgspec.Struct):
    message: str = ""


class _Line(msgspec.Struct):
    result: _Result | None = None
    error: _Error | None = None


class _Token(msgspec.Struct):
    token: str = ""


class EtcdPrefix:
    """The values of keys below `prefix`, by the rest of the key, from whichever of `urls` answers; as `user`, if there
    is one."""

    def __init__(
        self, urls: Sequence[str], prefix: str, *, ca_file: str = "", user: str = "", password: str = ""
    ) -> None:
        self._urls = urls
        self._prefix = prefix.encode()
        self._ca_file = ca_file
        self._files = TimedThread("etcd credentials")
        self._user = user
        self._password = password
        self._turn = 0  # next member, by the number of failures

    async def list_all(self) -> Listing[bytes]:
        """All of them, page by page, as of one revision."""
        found: dict[str, bytes] = {}
        start = self._prefix
        revision = 0
        async with self._connect() as api:
            while True:
                body = {
                    "key": _text(start),
                    "range_end": _text(_end_of(self._prefix)),
                    "limit": _PAGE,
                    "revision": revision,
                }
                raw = await api.call(
                    "POST",
                    "/v3/kv/range",
                    body=msgspec.json.encode(body),
                    timeout_s=_TIMEOUT_S,
                    max_bytes=_MAX_PAGE_BYTES,
                )
                page = api.decode(raw, _Range, "/v3/kv/range")
                revision = revision or _number(page.header.revision)
                found.update((self._name(kv), _bytes(kv.value)) for kv in page.kvs)
                check_count(len(found), "keys in etcd below the prefix")
                if not page.more or not page.kvs:
                    return Listing(found, str(revision))
                start = _bytes(page.kvs[-1].key) + b"\0"

    async def watch(self, version: str) -> AsyncGenerator[Changes[bytes]]:
        """Yield what changed since, as it does; without changes once it has begun."""
        create = {
            "key": _text(self._prefix),
            "range_end": _text(_end_of(self._prefix)),
            "start_revision": int(version) + 1,
        }
        async with self._connect() as api:
            stream = api.stream_lines(
                "POST",
                "/v3/watch",
                body=msgspec.json.encode({"create_request": create}),
                timeout_s=_TIMEOUT_S,
                idle_s=_IDLE_S,
                max_line_bytes=_MAX_LINE_BYTES,
            )
            async with aclosing(stream) as batches:
                async for lines in batches:
                    yield self._changes([_result(line) for line in lines])

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[StreamApi]:
        url = self._urls[self._turn % len(self._urls)]
        try:
            secured = url.startswith("https:")
            verify = await self._files.call(self._tls, timeout_s=_TIMEOUT_S) if secured else False
        except (OSError, ssl.SSLError) as error:
            why = str(error) or f"no answer within {_TIMEOUT_S:g} s"
            raise DiscoveryError(f"the authority of etcd's certificate cannot be read: {why}") from error
        try:
            async with httpx.AsyncClient(verify=verify, trust_env=False) as http:
                token = await self._authenticate(http, url) if self._user else None
                yield StreamApi(http, url, service="etcd", authorization=token)
        except Exception:
            self._turn += 1
            raise

    async def _authenticate(self, http: httpx.AsyncClient, url: str) -> str:
        """Return a token, which is good for a list or a watch that begins within minutes."""
        api = StreamApi(http, url, service="etcd")
        path = "/v3/auth/authenticate"
        body = msgspec.json.encode({"name": self._user, "password": self._password})
        try:
            raw = await api.call("POST", path, body=body, timeout_s=_TIMEOUT_S)
        except Refused as error:
            raise DiscoveryError(f"etcd does not let user {self._user!r} in: {error}") from error
        return api.decode(raw, _Token, path).token

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._ca_file or None)

    def _changes(self, results: Sequence[_Result]) -> Changes[bytes]:
        changed: dict[str, bytes | None] = {}
        version = ""
        for result in results:
            version = str(_number(result.header.revision)) if result.events else version
            for event in result.events:
                changed[self._name(event.kv)] = None if event.type == "DELETE" else _bytes(event.kv.value)
        return Changes(changed, version)

    def _name(self, kv: _KeyValue) -> str:
        return _bytes(kv.key)[len(self._prefix) :].decode(errors="replace")


def _result(line: bytes) -> _Result:
    try:
        decoded = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadResponse("a watch of etcd brought an invalid event") from error
    if decoded.result is None:
        raise ClientUnavailable(f"the watch of etcd ended: {decoded.error.message[:200] if decoded.error else 'empty'}")
    if _number(decoded.result.compact_revision):
        raise TooOld
    if decoded.result.canceled:
        raise ClientUnavailable(f"etcd ended the watch: {decoded.result.cancel_reason[:200]}")
    return decoded.result


def _end_of(prefix: bytes) -> bytes:
    """Return the first key beyond all that begin so."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else b"\0"


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > _LONGEST_REVISION:
        raise BadResponse("etcd sent a revision that is no number")
    return int(text)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadResponse("etcd sent a key or value that is not base64") from error
