"""HTTP for simulated servers: one exchange over ASGI, and a small JSON app that complains as FastAPI does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, Self

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
JSON = {"content-type": "application/json"}
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}
#: Routes counted one by one; a caller can invent any number of paths.
_COUNTED_ROUTES = 100
#: Field name -> type it must have; a name that ends in `?` may be missing or null.
Schema = Mapping[str, type]


class ClientGone(Exception):
    """The client closed the connection before it had sent its whole request."""


def encode_json(body: Any) -> bytes:
    """Compact JSON as FastAPI writes it."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


class HttpCall:
    """Wraps one ASGI HTTP scope. Header names are lower case; the body is read once, by `read`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

    async def read_body(self) -> bytes:
        """Return the whole request body."""
        chunks = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(chunks)

    async def send_reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send a complete answer."""
        await self.start_reply(status, {**(headers or {}), "content-length": str(len(body))})
        await self.send({"type": "http.response.body", "body": body})

    async def reply_json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a complete JSON answer."""
        await self.send_reply(status, encode_json(body), {**JSON, **(headers or {})})

    async def start_reply(self, status: int, headers: dict[str, str]) -> None:
        """Send the response head; `write` and `finish` follow."""
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write_chunk(self, data: bytes) -> None:
        """One chunk of a streamed body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish_reply(self) -> None:
        """Send the proper end of a streamed body. Without it the server breaks the connection."""
        await self.send({"type": "http.response.body", "body": b""})

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` until it ends (True) or the client leaves, which cancels it (False). Call after `read`."""
        task = asyncio.create_task(work, name=f"simulated {self.path}")
        watcher = asyncio.create_task(self._disconnected(), name=f"disconnect {self.path}")
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = task.done()
            task.cancel()
            watcher.cancel()
            await asyncio.wait({task, watcher})
        if done:
            task.result()
        return done

    async def _disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            continue


class HttpError(Exception):
    """Becomes a JSON answer of that status."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body


def detail_error(status: int, text: str) -> HttpError:
    """`{"detail": text}`."""
    return HttpError(status, {"detail": text})


class Request:
    """One request in parts: parameters of the path and of the query, and the raw body."""

    def __init__(self, path_values: dict[str, str], query: dict[str, str], raw: bytes) -> None:
        self.path_values = path_values
        self.query = query
        self._raw = raw

    def parse_body(self, schema: Schema) -> dict[str, Any]:
        """Return the validated JSON object; a 422 names every field that is wrong and echoes what was sent."""
        try:
            body = json.loads(self._raw)
        except ValueError as error:
            problem = {"type": "json_invalid", "loc": ["body", 0], "msg": "JSON decode error", "input": {}}
            raise HttpError(422, {"detail": [problem]}) from error
        if not isinstance(body, dict):
            problem = {"type": "model_attributes_type", "loc": ["body"], "msg": "Input should be a valid dictionary"}
            raise HttpError(422, {"detail": [{**problem, "input": body}]})
        problems = [found for name, kind in schema.items() if (found := _problem(body, name, kind)) is not None]
        if problems:
            raise HttpError(422, {"detail": problems})
        return body


Handler = Callable[[Request], Awaitable[Any]]


class HttpApp:
    """ASGI side of a simulated server: an exchange is answered as a call, and an error by its body. Its `parts` run
    while it is entered (it is an async context manager)."""

    parts: Sequence[contextlib.AbstractAsyncContextManager[object]] = ()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as starting:
            for part in self.parts:
                await starting.enter_async_context(part)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        call = HttpCall(scope, receive, send)
        with contextlib.suppress(ClientGone):
            try:
                await self.answer_call(call)
            except HttpError as error:
                await call.reply_json(error.body, error.status)

    async def answer_call(self, call: HttpCall) -> None:
        """Reply, or raise HttpError."""
        raise NotImplementedError


class JsonApp(HttpApp):
    """Routes by method and path template (`/instances/{id}`); `calls` counts them. A handler returns the body of a
    200, or a tuple of status and body."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._routes: list[tuple[str, str, re.Pattern[str], Handler]] = []

    def route(self, method: str, path: str, handler: Handler) -> None:
        """Add a route; the first match wins."""
        pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))
        self._routes.append((method, path, pattern, handler))

    async def answer_call(self, call: HttpCall) -> None:
        """By the first route that matches."""
        allowed = []
        for method, path, pattern, handler in self._routes:
            match = pattern.fullmatch(call.path)
            if match is not None and method == call.method:
                self._count(f"{method} {path}")
                await self._answer(call, handler, match.groupdict())
                return
            if match is not None:
                allowed.append(method)
        self._count(f"{call.method} {call.path}")
        if allowed:
            raise detail_error(405, "Method Not Allowed")
        raise detail_error(404, "Not Found")

    async def _answer(self, call: HttpCall, handler: Handler, path_values: dict[str, str]) -> None:
        pairs = [pair.partition("=") for pair in call.query.decode().split("&") if pair]
        request = Request(path_values, {name: value for name, _, value in pairs}, await call.read_body())
        await call.run_while_connected(self._run(call, handler, request))

    async def _run(self, call: HttpCall, handler: Handler, request: Request) -> None:
        answer = await handler(request)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        if status == 204:
            await call.send_reply(204)
        else:
            await call.reply_json(body, status)

    def _count(self, name: str) -> None:
        self.calls[name if name in self.calls or len(self.calls) < _COUNTED_ROUTES else "other"] += 1


def _problem(body: dict[str, Any], name: str, kind: type) -> dict[str, Any] | None:
    optional = name.endswith("?")
    name = name.removesuffix("?")
    if name not in body:
        missing = {"type": "missing", "loc": ["body", name], "msg": "Field required", "input": body}
        return None if optional else missing
    value = body[name]
    if optional and value is None:
        return None
    right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if right and kind is list and name.startswith("token") and not all(isinstance(item, int) for item in value):
        right = False
    if right:
        return None
    words = {"str": "string", "dict": "dictionary", "int": "integer", "bool": "boolean"}
    word = words.get(kind.__name__, kind.__name__)
    return {"type": f"{word}_type", "loc": ["body", name], "msg": f"Input should be a valid {word}", "input": value}
