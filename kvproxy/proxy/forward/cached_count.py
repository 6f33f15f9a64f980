"""The count of cached tokens, written into the usage of answers that leave it out, in the words of the client's API."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import RequestKind
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.proxy.metrics import RequestMetrics
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.usage import read_usage, write_cached

#: A longer answer, or event of a stream, is forwarded unchanged.
MAX_HELD_BYTES = 1024 * 1024

#: Marks of the last event with a usage in a stream. Generated text cannot contain them: its quotes are escaped.
_chat = re.compile(rb'"choices"\s?:\s?\[\]|"finish_reason"\s?:\s?"').search
_LAST = {
    RequestKind.CHAT: _chat,
    RequestKind.COMPLETION: _chat,
    RequestKind.MESSAGES: re.compile(rb'"type"\s?:\s?"message_delta"').search,
    RequestKind.RESPONSES: re.compile(rb'"type"\s?:\s?"response\.(?:completed|incomplete)"').search,
}
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


@dataclass(frozen=True, slots=True)
class CachedCounts:
    """Rewriting of cached-token counts in all answers of a router."""

    predicted: bool  # also kvproxy's own, if the engine reports none
    metrics: Metrics

    def follow(self, exchange: Exchange, response: UpstreamResponse) -> CachedCount | None:
        """Return what writes it into this answer; None where that cannot be done without knowing more of it."""
        kind = None if exchange.inference is None else exchange.inference.kind
        headers = dict(response.headers)
        told = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        streams = told == b"text/event-stream"
        if kind not in _LAST or response.status != 200 or b"content-encoding" in headers:
            return None
        if b"content-length" in headers if streams else told != b"application/json":
            return None
        return CachedCount(self, exchange, kind, streams)


class CachedCount(msgspec.Struct, eq=False):
    """Writes it into one answer. Of a stream only the last event with a usage is looked at, and an event that came in
    part waits for its rest."""

    _shared: CachedCounts
    _exchange: Exchange
    _kind: RequestKind
    streams: bool
    _head: bytes = b""  # its first events, in which Anthropic's count the prompt's tokens
    _held: bytes = b""  # the beginning of an event
    _off: bool = False  # an event was too long

    def next_piece(self, piece: bytes) -> bytes:
        """Return what of a stream goes down now: whole events."""
        if self._off:
            return piece
        piece = self._held + piece
        self._held = b""
        if not piece.endswith(_EVENT_ENDS):
            end = max((at + len(mark) for mark in _EVENT_ENDS if (at := piece.rfind(mark)) >= 0), default=0)
            self._off = len(piece) - end > MAX_HELD_BYTES
            if self._off:
                return piece
            piece, self._held = piece[:end], piece[end:]
        self._head = self._head or piece
        return self._with_count(piece)

    def finish(self, rest: bytes) -> bytes:
        """Return the end of a stream, or the whole of another answer."""
        rest = self._held + rest
        self._held = b""
        return self._with_count(rest)

    def _with_count(self, answer: bytes) -> bytes:
        if b'"usage"' not in answer or (self.streams and _LAST[self._kind](answer) is None):
            return answer
        head = (self._head or answer) if self._kind is RequestKind.MESSAGES else b""
        usage = read_usage(answer, head)
        if usage is None or usage.prompt_tokens is None:
            return answer
        cached = usage.cached_tokens
        predicted = None
        if cached is None and self._shared.predicted:
            cached = predicted = predict_cached(self._exchange, usage.prompt_tokens)
        if cached is None:
            return answer
        written = write_cached(answer, self._kind, prompt=usage.prompt_tokens, cached=cached)
        if written is not answer:
            self._exchange.outcome.predicted_tokens = predicted
            source = "engine" if predicted is None else "predicted"
            self._shared.metrics.group(RequestMetrics).cached_counts.labels(source).inc()
        return written


def predict_cached(exchange: Exchange, prompt_tokens: int) -> int | None:
    """Of a prompt that has so many tokens by the engine's count, what was estimated to be cached where it went. None:
    nothing is known of it. The last token is always computed."""
    facts = exchange.facts
    endpoint = exchange.outcome.endpoint
    inference = exchange.inference
    if facts is None or endpoint is None or inference is None or inference.continues is not None:
        return None
    if not (facts.searched and facts.prompt_tokens):
        return None
    return max(0, min(facts.matched_tokens(endpoint) * prompt_tokens // facts.prompt_tokens, prompt_tokens - 1))
