"""Interpretation of an engine's answer: its real status, the short body of an error, the verdict on its engine, and the
place of the next attempt, if any."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re

from kvproxy.base.errors import EngineReportedError, UpstreamError
from kvproxy.base.resilience.retry import full_jitter_s
from kvproxy.base.types import EndpointId
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.proxy.request.usage import error_status

#: Error answers up to this size are kept while another endpoint is tried; a longer one is forwarded as it comes.
_MAX_HELD_BYTES = 64 * 1024
_NO_MODEL = re.compile(
    rb'"param"\s*:\s*"model"|(?:model|adapter)[^"]{0,300}(?:does not exist|not found|not loaded)', re.I
)
#: The one 5xx that concerns the request: every engine of the kind answers it alike.
NOT_IMPLEMENTED = 501
#: Longest wait for such a body.
_ERROR_BODY_S = 1.0
#: Base and longest of the pauses before a retry once every endpoint was tried (full jitter, doubling).
BACKOFF_S = 0.025
MAX_BACKOFF_S = 1.0


async def read_beginning(response: UpstreamResponse, first: bytes) -> tuple[int, bytes]:
    """Return the status, or that of an error that a stream begins with, and as much as makes its first event whole, if
    it is one and its end is on the way."""
    if first.startswith((b"data:", b"event:", b":")):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ERROR_BODY_S):
                while not (response.complete or first.endswith(b"\n") or len(first) > _MAX_HELD_BYTES):
                    first += await response.next_chunk()
    return error_status(first, first=True) or response.status, first


async def read_short(response: UpstreamResponse, first: bytes) -> tuple[bytes, bool]:
    """Return the body of an error, and whether that is all to be had: it is short, or its rest stalls."""
    body = first
    try:
        async with asyncio.timeout(_ERROR_BODY_S):
            while not response.complete and len(body) <= _MAX_HELD_BYTES:
                body += await response.next_chunk()
    except TimeoutError:
        return body, True
    return (body + (response.take() or b""), True) if response.complete else (body, False)


def names_no_model(body: bytes) -> bool:
    """Return True if an engine's 404 means that it does not serve the model (vLLM), and not a missing path."""
    return _NO_MODEL.search(body) is not None


def verdict_on(status: int, error: UpstreamError | None) -> AttemptOutcome:
    """Of an answer that was no success."""
    if isinstance(error, EngineReportedError) and error.status < 500:
        return AttemptOutcome.CLIENT_ERROR
    if error is not None or (status >= 500 and status != NOT_IMPLEMENTED):
        return AttemptOutcome.FAILURE
    return AttemptOutcome.CLIENT_ERROR


class RetryState:
    """The history of one request's attempts.

    An endpoint may ask for several attempts on itself (its own `retry`); then every other engine is tried once, since
    the ranks of one fail together; after such a round all are eligible again.
    """

    __slots__ = ("_in_a_row", "_rng", "_rounds", "_tried", "again")

    def __init__(self, *, rng: random.Random) -> None:
        self._rng = rng
        self._tried: set[EndpointId] = set()
        self._rounds = 0
        self._in_a_row = 0
        self.again: EndpointId | None = None  # the endpoint whose own retry is next

    @property
    def excluded(self) -> frozenset[EndpointId]:
        """Endpoints tried in this round."""
        return frozenset(self._tried)

    def count_failure(self, endpoint: Endpoint) -> float | None:
        """Seconds to pause before the next attempt; None when this endpoint's failure is to be the answer."""
        own = endpoint.retry
        self._in_a_row += 1
        if own is not None and self._in_a_row < own.attempts:
            self.again = endpoint.id
            return min(own.max_backoff, own.backoff * own.multiplier ** (self._in_a_row - 1))
        self.again = None
        self._in_a_row = 0
        self._tried.add(endpoint.id)
        self._tried.update(endpoint.engine.members)
        return 0.0 if own is None or own.fallback else None

    def next_round(self) -> float | None:
        """All endpoints were tried: seconds to pause (full jitter) until all are eligible again, None if they are."""
        if not self._tried:
            return None
        self._tried.clear()
        self._rounds += 1
        return full_jitter_s(self._rounds, base_s=BACKOFF_S, max_s=MAX_BACKOFF_S, rng=self._rng)
