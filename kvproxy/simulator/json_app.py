"""A small JSON-over-HTTP app with FastAPI's answers to what is wrong, for the simulated LMCache services."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvproxy.simulator.http_call import ClientGone, HttpCall, Receive, Scope, Send

#: Calls are counted under at most so many names; strangers could make up any number of paths.
_COUNTED_ROUTES = 100

#: Field name -> type it must have; a name that ends in `?` may be missing or null.
Schema = Mapping[str, type]


class HttpError(Exception):
    """Becomes a JSON answer of that status."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body


def detail(status: int, text: str) -> HttpError:
    """`{"detail": text}`."""
    return HttpError(status, {"detail": text})


class Request:
    """One request in parts: parameters of the path and of the query, and the raw body."""

    def __init__(self, path_values: dict[str, str], query: dict[str, str], raw: bytes) -> None:
        self.path_values = path_values
        self.query = query
        self._raw = raw

    def body(self, schema: Schema) -> dict[str, Any]:
        """The validated JSON object; a 422 names every field that is wrong and echoes what was sent."""
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


class JsonApp:
    """Routes by method and path template (`/instances/{id}`); `calls` counts them. A handler returns the body of a
    200, or a tuple of status and body."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._routes: list[tuple[str, str, re.Pattern[str], Handler]] = []

    def route(self, method: str, path: str, handler: Handler) -> None:
        """Adds a route; the first match wins."""
        pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))
        self._routes.append((method, path, pattern, handler))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(scope, receive, send)
        with contextlib.suppress(ClientGone):
            try:
                await self._route(call)
            except HttpError as error:
                await call.reply_json(error.body, error.status)

    async def _route(self, call: HttpCall) -> None:
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
            raise detail(405, "Method Not Allowed")
        raise detail(404, "Not Found")

    async def _answer(self, call: HttpCall, handler: Handler, path_values: dict[str, str]) -> None:
        pairs = [pair.partition("=") for pair in call.query.decode().split("&") if pair]
        request = Request(path_values, {name: value for name, _, value in pairs}, await call.read())
        await call.while_connected(self._run(call, handler, request))

    async def _run(self, call: HttpCall, handler: Handler, request: Request) -> None:
        answer = await handler(request)
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        if status == 204:
            await call.reply(204)
        else:
            await call.reply_json(body, status)

    def _count(self, name: str) -> None:
        self.calls[name if name in self.calls or len(self.calls) < _COUNTED_ROUTES else "other"] += 1


def _problem(body: dict[str, Any], name: str, kind: type) -> dict[str, Any] | None:
    optional, name = name.endswith("?"), name.removesuffix("?")
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
