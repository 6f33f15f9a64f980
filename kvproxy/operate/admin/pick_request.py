"""Input of `POST /pick` and of `/done`, fully checked."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from kvproxy.base.errors import Problem
from kvproxy.base.json_scan import MAX_DECODED_BYTES, Edit, Unreadable, apply_edits, find_members, run_in_turns
from kvproxy.base.settings.paths import spelling_hint
from kvproxy.base.types import InferenceRequest
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.operate.admin.replies import RequestRefused, receive_body
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH
from kvproxy.proxy.request.parse import read_body
from kvproxy.proxy.request.session import Caller, Session, bounded_key
from kvproxy.proxy.request.usage import MAX_COUNT
from kvproxy.proxy.reservations import Ended

DEFAULT_PATH = "/v1/chat/completions"
_MAX_REST_BYTES = 64 * 1024
DEFAULT_LEASE_S = 60.0
MAX_LEASE_S = 3600.0


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /pick`; `request` is what the engine will be sent, to the byte."""

    request: msgspec.Raw
    path: str = DEFAULT_PATH
    session: str = ""  # its key; takes precedence over the body
    policy: str = ""  # one of the cluster's client_policies
    reserve: bool = False
    lease_s: float = DEFAULT_LEASE_S
    first_token: bool = False  # the caller will report the first token


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /pick/ID/done`."""

    status: int = 200  # status of the engine's answer; 0: no answer
    cancelled: bool = False  # the client left
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


async def parse_question(request: Request, *, most_bytes: int) -> tuple[Question, bytes, InferenceRequest]:
    """Return the question, the raw inference body in it, and that parsed. RequestRefused with what is wrong."""
    question, body = await _question(await receive_body(request, most=most_bytes))
    kind = KIND_OF_PATH.get(question.path)
    if kind is None:
        hint = spelling_hint(question.path, KIND_OF_PATH) or f"known: {', '.join(KIND_OF_PATH)}"
        raise RequestRefused(422, Problem("path", "not an inference path", hint))
    if not 0 < question.lease_s <= MAX_LEASE_S:
        raise RequestRefused(
            422, Problem("lease_s", "not a possible lease", f"allowed: more than 0, at most {MAX_LEASE_S:g}")
        )
    session = Session(bounded_key(question.session)) if question.session else None
    inference = await read_body(kind, body, caller=Caller(session), pace=asyncio.Lock())
    if inference is None:
        raise RequestRefused(422, Problem("request", "not a body of this path", "the body for the engine"))
    return question, body, inference


async def _question(body: bytes) -> tuple[Question, bytes]:
    """Return the question and the request in it; a long one is cut out in steps."""
    if len(body) <= MAX_DECODED_BYTES:
        question = _decoded(body, Question)
        return question, bytes(question.request)
    pace = asyncio.Lock()
    try:
        found = (await run_in_turns(find_members(body, "request".__eq__), pace)).found
    except Unreadable as broken:
        raise RequestRefused(400, Problem("(body)", str(broken), _form(Question))) from None
    rest = await run_in_turns(apply_edits(body, [Edit(*each.value, b"null") for each in found]), pace)
    if len(rest) > _MAX_REST_BYTES:
        raise RequestRefused(
            413, Problem("(body)", f"larger than {_MAX_REST_BYTES} bytes without `request`", "send less")
        )
    question = _decoded(rest, Question)
    start, end = found[-1].value
    return question, await run_in_turns(apply_edits(body, [Edit(0, start), Edit(end, len(body))]), pace)


async def parse_report(request: Request) -> Ended:
    """How the request went; an empty body is a good answer. RequestRefused with what is wrong."""
    report = _decoded(await receive_body(request) or b"{}", Report)
    problems = [
        Problem(name, "not a number of tokens", "a whole number from 0 on")
        for name in ("prompt_tokens", "cached_tokens")
        if not 0 <= (getattr(report, name) or 0) <= MAX_COUNT
    ]
    if problems:
        raise RequestRefused(422, *problems)
    return Ended(_outcome(report), report.prompt_tokens, report.cached_tokens)


def _outcome(report: Report) -> AttemptOutcome:
    if report.cancelled:
        return AttemptOutcome.CANCELLED
    if report.status == 503:
        return AttemptOutcome.BUSY
    if not 100 <= report.status < 500:
        return AttemptOutcome.FAILURE
    return AttemptOutcome.CLIENT_ERROR if report.status >= 400 else AttemptOutcome.SUCCESS


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
        raise RequestRefused(400, Problem("(body)", str(broken), _form(kind))) from None


def _form(kind: type[Any]) -> str:
    return f"an object with some of: {', '.join(field.name for field in msgspec.structs.fields(kind))}"
