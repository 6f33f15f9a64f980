"""HTTP of simulated servers: a Starlette app that complains as FastAPI does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

#: Answers with the body of a 200 in JSON, or with a response.
Handler = Callable[[Request], Awaitable[Any]]
#: Paths counted one by one; a caller can invent any number of them.
_COUNTED_ROUTES = 100
_Result = TypeVar("_Result")
_Body = TypeVar("_Body", bound=BaseModel)


def encode_json(body: Any) -> bytes:
    """Compact JSON as FastAPI writes it."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


class HttpError(Exception):
    """Becomes a JSON answer of that status."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body


def detail_error(status: int, text: str) -> HttpError:
    """`{"detail": text}`."""
    return HttpError(status, {"detail": text})


class JsonApp:
    """An ASGI app. Serve it while it is entered (it is an async context manager): its `parts` run meanwhile. `calls`
    counts requests by route, unknown ones too, such as `GET /health`."""

    parts: Sequence[contextlib.AbstractAsyncContextManager[object]] = ()

    def __init__(self) -> None:
        handlers: dict[Any, Any] = {
            HttpError: reply_error,
            HTTPException: self._reply_no_route,
            ClientDisconnect: _reply_nothing,
        }
        self._app = Starlette(exception_handlers=handlers)
        self.calls: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as starting:
            for part in self.parts:
                await starting.enter_async_context(part)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def answer(self, method: str, path: str, handler: Handler) -> None:
        """Add a route; the first match wins."""

        async def endpoint(request: Request) -> Response:
            self.calls[f"{method} {path}"] += 1
            answer = await handler(request)
            return answer if callable(answer) else JSONResponse(answer)

        self._app.router.add_route(path, endpoint, methods=[method])

    async def _reply_no_route(self, request: Request, error: HTTPException) -> Response:
        name = f"{request.method} {request.url.path}"
        self.calls[name if name in self.calls or len(self.calls) < _COUNTED_ROUTES else "other"] += 1
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def reply_error(_request: object, error: HttpError) -> Response:
    """Return the answer that an error is."""
    return JSONResponse(error.body, error.status)


async def _reply_nothing(_request: Request, _error: ClientDisconnect) -> None:
    """Return no answer, as the client has left."""


async def parse_body(request: Request, model: type[_Body]) -> _Body:
    """Return the validated body; a 422 names every field that is wrong and echoes what was sent."""
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        problem = {"type": "json_invalid", "loc": ["body", 0], "msg": "JSON decode error", "input": {}}
        raise HttpError(422, {"detail": [problem]}) from error
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise HttpError(422, {"detail": [{**one, "loc": ["body", *one["loc"]]} for one in found]}) from error


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` to its end. ClientDisconnect if the client leaves before, which cancels it. The request's body must be
    read already."""
    task = asyncio.create_task(work, name="simulated answer")
    watcher = asyncio.create_task(_wait_for_disconnect(receive), name="disconnect")
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        done = task.done()
        task.cancel()
        watcher.cancel()
        await asyncio.wait({task, watcher})
    if not done:
        raise ClientDisconnect
    return task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
