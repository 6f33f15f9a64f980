"""The pool as an httpx transport, so that every httpx client of the project rides on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import httpx

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.errors import (
    ConnectError,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    PoolFull,
    UnsafeRequest,
    UpstreamDisconnected,
    UpstreamProtocolError,
)
from kvproxy.base.tls.files import ClientTls
from kvproxy.base.types import Headers
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool, UpstreamResponse
from kvproxy.base.upstream.request import Body

_MAX_ORIGINS = 1024

#: Ours to theirs, the more special first.
_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (ConnectTimeout, httpx.ConnectTimeout),
    (ConnectError, httpx.ConnectError),
    (PoolFull, httpx.PoolTimeout),
    (FirstByteTimeout, httpx.ReadTimeout),
    (IdleTimeout, httpx.ReadTimeout),
    (UpstreamDisconnected, httpx.RemoteProtocolError),
    (UpstreamProtocolError, httpx.RemoteProtocolError),
    (UnsafeRequest, httpx.LocalProtocolError),
)


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends httpx requests through `pool`, streaming both ways; closing the client leaves the pool open.

    `timeouts` apply where a request brings none of its own (httpx: connect; read for first byte and silence).
    `server_name` is the name expected to answer, where URLs hold addresses.
    """

    def __init__(
        self,
        pool: UpstreamPool,
        timeouts: Timeouts | None = None,
        *,
        tls: ClientTls = ClientTls(),
        server_name: str = "",
    ) -> None:
        self._pool = pool
        self._timeouts = timeouts or Timeouts()
        self._tls = tls
        self._server_name = server_name
        self._origins: BoundedMapping[tuple[str, str, int | None], Origin] = BoundedMapping(_MAX_ORIGINS)
        self._places: BoundedMapping[str, tuple[Origin, bytes]] = BoundedMapping(_MAX_ORIGINS)  # by URL

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _as_httpx(request):
            response = await self._pool.request(
                self._origin(request.url),
                request.method.encode("ascii"),
                request.url.raw_path,
                self._headers(request),
                _body(request),
                timeouts=self._timeouts_of(request),
            )
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_ResponseStream(response, request),
            extensions={"http_version": b"HTTP/1.1"},
        )

    async def fetch(
        self, method: bytes, url: str, headers: Headers, body: bytes | None, *, timeout_s: float
    ) -> UpstreamResponse:
        """Send one request without what httpx does around it, which takes longer than all the rest.

        As for `UpstreamPool.request`; also raises httpx.InvalidURL and UnsupportedProtocol.
        """
        place = self._places.get(url)
        if place is None:
            parsed = httpx.URL(url)
            place = self._places[url] = (self._origin(parsed), parsed.raw_path)
        origin, target = place
        timeouts = Timeouts(timeout_s, timeout_s, timeout_s)
        return await self._pool.request(origin, method, target, headers, body, timeouts=timeouts)

    def _headers(self, request: httpx.Request) -> Headers:
        """With a server name, Host is the origin's business: httpx would write the address."""
        named = bool(self._server_name)
        pairs = ((name.lower(), value) for name, value in request.headers.raw)
        return [(name, value) for name, value in pairs if not named or name != b"host"]

    def _origin(self, url: httpx.URL) -> Origin:
        key = (url.scheme, url.host, url.port)
        origin = self._origins.get(key)
        if origin is None:
            if url.scheme not in ("http", "https"):
                raise httpx.UnsupportedProtocol(f"http or https, not {url.scheme!r}")
            port = url.port or (443 if url.scheme == "https" else 80)
            host = url.raw_host.decode("ascii").strip("[]")
            origin = Origin(url.scheme, host, port, b"", self._tls, self._server_name)
            self._origins[key] = origin
        return origin

    def _timeouts_of(self, request: httpx.Request) -> Timeouts:
        given: dict[str, float | None] | None = request.extensions.get("timeout")
        if given is None:
            return self._timeouts
        read_s = given.get("read") or 0
        return Timeouts(connect_s=given.get("connect") or 0, first_byte_s=read_s, idle_s=read_s)


class PooledClient(httpx.AsyncClient):
    """A client over the pool, whose transport also takes requests past httpx (`PoolTransport.fetch`)."""

    def __init__(self, transport: PoolTransport) -> None:
        super().__init__(transport=transport, trust_env=False)
        self.pooled = transport


class HttpClients:
    """httpx clients over one pool, one for each way to verify a server, made on first use."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._clients: dict[tuple[ClientTls, str], PooledClient] = {}

    async def aclose(self) -> None:
        """Close the clients, not the pool."""
        for client in self._clients.values():
            await client.aclose()

    def client(self, origin: Origin | None = None) -> httpx.AsyncClient:
        """Return the client for origins that are verified as this one; None: by their own names."""
        verified = (ClientTls(), "") if origin is None else (origin.tls, origin.server_name)
        client = self._clients.get(verified)
        if client is None:
            tls, server_name = verified
            transport = PoolTransport(self._pool, tls=tls, server_name=server_name)
            client = self._clients[verified] = PooledClient(transport)
        return client


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(self, response: UpstreamResponse, request: httpx.Request) -> None:
        self._response = response
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx(self._request):
            while data := await self._response.next_chunk():
                yield data

    async def aclose(self) -> None:
        self._response.abort()


def _body(request: httpx.Request) -> Body:
    try:
        return request.content or None
    except httpx.RequestNotRead:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        return aiter(request.stream)


@contextlib.contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    try:
        yield
    except tuple(ours for ours, _ in _ERRORS) as error:
        theirs = next(theirs for ours, theirs in _ERRORS if isinstance(error, ours))
        raise theirs(str(error), request=request) from error
