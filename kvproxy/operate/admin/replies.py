"""JSON in and out of the admin listener: bounded bodies, errors with cause, place and remedy; the audit log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvproxy.base.errors import Problem
from kvproxy.operate.log_lines import log_fields
from kvproxy.proxy.request.body import Pieces

MAX_BODY_BYTES = 64 * 1024
#: Answers hold live state and possibly addresses: no cache may keep them.
_NO_STORE = {"cache-control": "no-store"}
#: In a request's scope: true if another process of this proxy writes the line.
REPEATED = "kvproxy.repeated"
log = logging.getLogger("kvproxy.audit")


class RequestRefused(Exception):
    """The request cannot be done; every problem with it."""

    def __init__(self, status: int, *problems: Problem) -> None:
        super().__init__(problems[0].message)
        self.status = status
        self.problems = problems


def reply_json(data: object, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return `data` as JSON; numbers that JSON lacks become null."""
    return Response(msgspec.json.encode(data), status, {**_NO_STORE, **(headers or {})}, media_type="application/json")


def encode_part(data: object) -> msgspec.Raw:
    """Return a part of an answer as JSON: one of thousands, so that they are not all encoded in one turn of the event
    loop."""
    return msgspec.Raw(msgspec.json.encode(data))


def reply_error(status: int, problems: Sequence[Problem], *, headers: Mapping[str, str] | None = None) -> Response:
    """`{"error": what, "problems": [{"where", "what", "fix"}]}`; the first problem is the headline."""
    listed = [
        {"where": f"{one.place}: {one.path}".strip(": "), "what": one.message, "fix": one.hint} for one in problems
    ]
    return reply_json({"error": problems[0].message, "problems": listed}, status, headers=headers)


async def on_refused(request: Request, refused: Exception) -> Response:
    """Starlette's handler for RequestRefused."""
    assert isinstance(refused, RequestRefused)
    return reply_error(refused.status, refused.problems)


async def on_http_error(request: Request, raised: Exception) -> Response:
    """Starlette's handler for paths and methods there are not."""
    assert isinstance(raised, HTTPException)
    path = request.url.path
    if raised.status_code == 405:
        allowed = (raised.headers or {}).get("Allow", "")
        problem = Problem(path, f"{request.method} is not possible here", f"allowed: {allowed}")
    elif raised.status_code == 404:
        problem = Problem(path, "there is nothing here", "docs/admin.md lists what there is")
    else:
        problem = Problem(path, raised.detail)
    return reply_error(raised.status_code, [problem], headers=raised.headers)


async def receive_body(request: Request, *, most: int = MAX_BODY_BYTES) -> bytes:
    """Return the request's body, of at most `most` bytes; RequestRefused otherwise."""
    pieces = Pieces()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise RequestRefused(413, Problem("(body)", f"larger than {most} bytes", "send less"))
        pieces.append(chunk)
    return pieces.joined()


async def read_json_object(request: Request, *, optional: bool = False) -> dict[str, Any]:
    """Return the body, a JSON object of at most 64 KiB; RequestRefused otherwise. `optional`: an empty body is {}."""
    body = await receive_body(request)
    if not body and optional:
        return {}
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
        raise RequestRefused(400, Problem("(body)", f"not JSON: {broken}", "send a JSON object")) from None
    if not isinstance(data, dict):
        raise RequestRefused(400, Problem("(body)", "not a JSON object", 'send {"name": value, ...}'))
    return data


def read_number(request: Request, *, default: int, most: int, name: str = "limit") -> int:
    """Return the number `name` of the query; RequestRefused unless it is a whole number from 1 to `most`."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestRefused(400, Problem(name, "not a possible number", f"allowed: 1 to {most}"))
    return int(text)


class Audit:
    """Writes to the logger `kvproxy.audit`, one line a change, never a secret, whatever the log level is."""

    def __init__(self) -> None:
        log.setLevel(logging.INFO)

    def write_line(self, request: Request, action: str, **what: Any) -> None:
        """`request` changed something; `what` shows what, with plain values."""
        if request.scope.get(REPEATED):
            return
        origin = request.client.host if request.client else "unknown"
        log_fields(log, "admin", {"action": action, "from": origin, **what})
