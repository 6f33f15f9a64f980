"""What an engine's answer means: the status it really has, the short body of an error, the verdict on its engine."""

from __future__ import annotations

import asyncio
import contextlib
import re

from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.errors import EngineReportedError, UpstreamError
from kvproxy.request.usage import ERROR_MARK, error_status
from kvproxy.upstream.response import UpstreamResponse

#: An error answer kept while another endpoint is tried is no longer than this; a longer one goes down as it comes.
_MAX_HELD_BYTES = 64 * 1024
_NO_MODEL = re.compile(
    rb'"param"\s*:\s*"model"|(?:model|adapter)[^"]{0,300}(?:does not exist|not found|not loaded)', re.I
)
#: Nor is its body waited for longer than this.
_ERROR_BODY_S = 1.0


def may_be_error(status: int, first: bytes) -> bool:
    """Whether an answer that begins so has to be looked at: an engine that died in its prefill streams an error."""
    return status == 200 and ERROR_MARK in first


async def read_beginning(response: UpstreamResponse, first: bytes) -> tuple[int, bytes]:
    """The status, or that of an error that a stream begins with, and as much as makes its first event whole, if it is
    one and its end is on the way."""
    if first.startswith((b"data:", b"event:", b":")):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ERROR_BODY_S):
                while not (response.complete or first.endswith(b"\n") or len(first) > _MAX_HELD_BYTES):
                    first += await response.chunk()
    return error_status(first, first=True) or response.status, first


async def read_short(response: UpstreamResponse, first: bytes) -> tuple[bytes, bool]:
    """The body of an error, and whether that is all to be had: it is short, or its rest stalls."""
    body = first
    try:
        async with asyncio.timeout(_ERROR_BODY_S):
            while not response.complete and len(body) <= _MAX_HELD_BYTES:
                body += await response.chunk()
    except TimeoutError:
        return body, True
    return (body + (response.take() or b""), True) if response.complete else (body, False)


def names_no_model(body: bytes) -> bool:
    """Whether an engine's 404 says that it does not serve the model (vLLM), and not that there is no such path."""
    return _NO_MODEL.search(body) is not None


def verdict_on(status: int, error: UpstreamError | None) -> AttemptOutcome:
    """Of an answer that was no success."""
    if isinstance(error, EngineReportedError) and error.status < 500:
        return AttemptOutcome.CLIENT_ERROR
    if error is not None or status >= 500:
        return AttemptOutcome.FAILURE
    return AttemptOutcome.CLIENT_ERROR
