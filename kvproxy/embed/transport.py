"""Transports for httpx and httpx2: a client's requests go where they cost least, with no server between.

client = openai.AsyncOpenAI(
    base_url="http://engines/v1",
    http_client=httpx.AsyncClient(transport=kvproxy.AsyncTransport(endpoints={"a": "http://a:8000", ...})),
)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import httpx
import msgspec
from starlette.types import Scope

from kvproxy.app import ConfigLike, Proxy
from kvproxy.base.background_task import find_loop
from kvproxy.embed.call import Call
from kvproxy.embed.lives import Background, Life, Lives, background
from kvproxy.proxy.request.exchange import Exchange

if TYPE_CHECKING:
    import httpx2

    class _AsyncBase(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport): ...  # type: ignore[misc]

    class _Base(httpx.BaseTransport, httpx2.BaseTransport): ...  # type: ignore[misc]
else:
    _AsyncBase = httpx.AsyncBaseTransport
    _Base = httpx.BaseTransport

#: Names of the errors that httpx's own transport would raise, by the reason of the proxy's answer.
_RAISED: Mapping[str, str] = {
    "connect_error": "ConnectError",
    "no_file_descriptors": "ConnectError",
    "connect_timeout": "ConnectTimeout",
    "first_byte_timeout": "ReadTimeout",
    "idle_timeout": "ReadTimeout",
    "pool_full": "PoolTimeout",
    "unhealthy": "ReadError",
    "upstream_disconnected": "RemoteProtocolError",
    "protocol_error": "RemoteProtocolError",
}
_DROPPED = frozenset({b"transfer-encoding", b"connection"})


class AsyncTransport(_AsyncBase):
    """Gives an `AsyncClient` of httpx or httpx2 KV-aware routing over several engines: the whole chain of the proxy, in
    the client's own event loop.

    `endpoints` is `{id: url}`; or `config` is a configuration as for `Proxy` (a path, plain data), or a running
    `Proxy` that several transports share. Host and port of the client's URLs are ignored. Requests take the `read` time
    limit of the client; connections to engines go by the configuration. Where no engine answered, httpx's exceptions
    are raised, as its own transport would; 429 and 503 with `retry-after` are answers.

    It starts with its first request and ends with its client. Several clients and event loops may use it. Raises
    ConfigError for a configuration that `kvproxy check` refuses.
    """

    def __init__(self, config: ConfigLike | Proxy | None = None, *, endpoints: Mapping[str, str] | None = None) -> None:
        self._lives = Lives(config, endpoints)

    @property
    def proxy(self) -> Proxy:
        """The proxy behind it, in the running event loop: metrics, clusters, `status`."""
        return self._lives.of_running_loop().proxy

    async def __aenter__(self) -> AsyncTransport:
        life = self._lives.of_running_loop()
        if not life.started:
            await life.start()
        return self

    async def aclose(self) -> None:
        """End requests that are under way, and the proxy."""
        await self._lives.end()

    async def handle_async_request(self, request: Any) -> Any:
        """As of httpx."""
        life = self._lives.of_running_loop()
        if not life.started:
            await life.start()
        library = _library_of(request)
        call = await _ask(life, request, _body_of(request, library), library)
        stream = _stream_type(_Answer, library.AsyncByteStream)(call, self._lives)
        return library.Response(call.status, headers=call.headers, stream=stream)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("AsyncTransport is for an AsyncClient; give a Client kvproxy.Transport")

    __enter__ = __exit__ = close = handle_request = _refuse


class _Answer:
    """Iterator of the pieces. (No generator, which an event loop keeps account of.)"""

    def __init__(self, call: Call, lives: Lives) -> None:
        self._call = call
        self._lives = lives  # not to be collected while the answer is read

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if piece := await self._call.next_piece():
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._call.leave()


class Transport(_Base):
    """AsyncTransport for a `Client`. The proxy runs in a thread that all transports of a process share."""

    def __init__(self, config: ConfigLike | Proxy | None = None, *, endpoints: Mapping[str, str] | None = None) -> None:
        self._lives = Lives(config, endpoints)

    @property
    def proxy(self) -> Proxy:
        """The proxy behind it, which runs in that thread: for a look at metrics and `status`."""
        return background().run(self._life()).proxy

    def close(self) -> None:
        """End requests that are under way, and the proxy."""
        background().run(self._lives.end())

    def handle_request(self, request: Any) -> Any:
        """As of httpx."""
        library = _library_of(request)
        there = background()
        body = b"".join(request.stream)
        call = there.run(self._ask(request, body, library))
        stream = _stream_type(_SyncAnswer, library.SyncByteStream)(call, there, self._lives)
        return library.Response(call.status, headers=call.headers, stream=stream)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("Transport is for a Client; give an AsyncClient kvproxy.AsyncTransport")

    __aenter__ = __aexit__ = aclose = handle_async_request = _refuse

    async def _life(self) -> Life:
        return self._lives.of_running_loop()

    async def _ask(self, request: Any, body: bytes, library: Any) -> Call:
        life = await self._life()
        if not life.started:
            await life.start()
        return await _ask(life, request, body, library)


class _SyncAnswer:
    def __init__(self, call: Call, there: Background, lives: Lives) -> None:
        self._call = call
        self._there = there
        self._lives = lives

    def __iter__(self) -> Iterator[bytes]:
        call = self._call
        while not call.complete:
            if piece := self._there.run(call.next_piece()):
                yield piece
        if piece := call.take():  # no more pieces will come
            yield piece

    def close(self) -> None:
        if not self._call.complete:
            self._there.loop.call_soon_threadsafe(self._call.leave)


def _library_of(request: Any) -> Any:
    """Return the library of a request: httpx, or its successor of the same shape."""
    return sys.modules[type(request).__module__.partition(".")[0]]


@functools.cache
def _stream_type(answer: Any, base: type) -> Any:
    """Return the class of answers that is also one of the library's streams, as its clients require."""
    return type(answer.__name__, (answer, base), {})


async def _ask(life: Life, request: Any, body: bytes | AsyncIterator[bytes], library: Any) -> Call:
    """Return the call once the head of its answer is there. Raises the library's exceptions."""
    scope = _scope_of(request)
    exchange = Exchange.of(scope, now=life.proxy.clock())
    exchange.breaks_off = True
    limit_s: float | None = request.extensions.get("timeout", {}).get("read")  # for each wait for the engine
    call = Call(find_loop(), library, body, life.find_limit(limit_s))
    life.begin(call, scope)
    try:
        if await call.head() >= 500 and (reason := exchange.outcome.local_reason) in _RAISED:
            raise getattr(library, _RAISED[reason])(_message_of(await call.next_piece()))
    except BaseException:
        call.leave()
        raise
    return call


def _scope_of(request: Any) -> Scope:
    target, _, query = request.url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": target,
        "query_string": query,
        "root_path": "",
        "headers": [pair for name, value in request.headers.raw if (pair := (name.lower(), value))[0] not in _DROPPED],
        "client": None,
        "server": None,
        "state": {},
        "extensions": {},
    }


def _message_of(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["message"])


def _body_of(request: Any, library: Any) -> bytes | AsyncIterator[bytes]:
    """Return the client's body: whole, or, where its own code makes it in pieces, as it comes."""
    stream = request.stream
    return b"".join(stream) if isinstance(stream, library.ByteStream) else aiter(stream)
