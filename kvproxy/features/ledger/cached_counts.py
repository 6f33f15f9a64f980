"""The count of cached tokens, written into the usage of answers that leave it out, in the words of the client's API."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import msgspec

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import RequestKind
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.features.ledger.metrics import CachedCountMetrics
from kvproxy.proxy.forward.relay import MAX_HELD_BYTES
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.usage import INVALID, find_counts, read_usage

_NULL = msgspec.Raw(b"null")

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
            self._shared.metrics.group(CachedCountMetrics).written.labels(source).inc()
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


#: Place of the count of cached tokens in the usage of these APIs.
_DETAILS = {
    RequestKind.CHAT: "prompt_tokens_details",
    RequestKind.COMPLETION: "prompt_tokens_details",
    RequestKind.RESPONSES: "input_tokens_details",
}


class _RawAnswer(msgspec.Struct):
    usage: msgspec.Raw = _NULL


class _RawWrapped(msgspec.Struct):
    response: _RawAnswer


def write_cached(answer: bytes, kind: RequestKind, *, prompt: int, cached: int) -> bytes:
    """Return the answer, or an event of a stream, with this count of cached tokens (of its `prompt` tokens) in its
    usage, in the words of its API. As it is where its usage has that count already, or cannot be read."""
    found = find_counts(answer, b'"usage"')
    if found is None:
        return answer
    counts, position, rest, wraps = found
    usage = _raw_usage(rest, wraps=wraps)
    fresh = max(0, prompt - cached - (counts.cache_creation_input_tokens or 0))
    written = usage
    with contextlib.suppress(*INVALID):  # with fields beside the counts that only a lenient reader skips
        written = _with_cached(usage, kind, fresh=fresh, cached=cached)
    if written is usage:
        return answer
    start = answer.index(usage, position)
    return answer[:start] + written + answer[start + len(usage) :]


def _raw_usage(rest: bytes, *, wraps: bool) -> bytes:
    """Return the bytes of the usage that `find_counts` reads."""
    if wraps:
        with contextlib.suppress(*INVALID):
            return bytes(_raw_wrapped.decode(b'{"response":{' + rest).response.usage)
    return bytes(_raw_answer.decode(b"{" + rest).usage)


def _with_cached(usage: bytes, kind: RequestKind, *, fresh: int, cached: int) -> bytes:
    """`fresh`: what Anthropic's `input_tokens` leaves of the prompt."""
    fields = _raw_fields.decode(usage)
    if kind is RequestKind.MESSAGES:
        if fields.get("cache_read_input_tokens", _NULL) != _NULL:
            return usage
        fields["cache_read_input_tokens"] = msgspec.Raw(b"%d" % cached)
        fields["input_tokens"] = msgspec.Raw(b"%d" % fresh)
    else:
        details = msgspec.json.decode(fields.get(_DETAILS[kind], _NULL)) or {}
        if details.get("cached_tokens") is not None:
            return usage
        fields[_DETAILS[kind]] = msgspec.Raw(msgspec.json.encode({**details, "cached_tokens": cached}))
    return msgspec.json.encode(fields)


_raw_answer = msgspec.json.Decoder(_RawAnswer)
_raw_wrapped = msgspec.json.Decoder(_RawWrapped)
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
