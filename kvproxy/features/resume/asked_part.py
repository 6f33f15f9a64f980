"""One of several requests that another engine is sent for the rest of a stream."""

from __future__ import annotations

import asyncio

from kvproxy.base.errors import UpstreamDisconnected
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.proxy.request.continuation import AsksEngines

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class PartFailed(UpstreamDisconnected):
    """The engine, or a gateway before it, answers with a status from 500 on."""


async def fetch_part(request: AsksEngines, pick: Pick, target: bytes, body: bytes, *, refusal: str) -> bytes:
    """Return the body of a good answer. Raises Mismatch if the engine refuses to answer, PartFailed or another
    UpstreamError if it fails."""
    response, status, first = await request.ask(pick, target, body)
    answer = bytearray(first)
    try:
        while len(answer) <= _MAX_ANSWER_BYTES and (piece := await response.next_chunk()):
            answer += piece
    finally:
        response.abort()
    if status >= 500:
        raise PartFailed(f"{pick.endpoint.id} answers {status}")
    if status != 200 or not response.complete:
        raise Mismatch(f"{target.decode()} answers {status}", refusal=refusal)
    return bytes(answer)


def fail_at_once(error: Mismatch) -> tuple[UpstreamResponse, int, bytes]:
    """Return the beginning of a stream that breaks there: the engine is not to blame, and none is tried instead."""
    response = UpstreamResponse(
        None, asyncio.get_running_loop(), status=200, headers=[(b"content-type", b"text/event-stream")]
    )
    response.fail(error, rest=b"")
    return response, 200, b""
