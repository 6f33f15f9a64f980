"""Finds the response in an answer of `/v1/responses`, whole or streamed. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from kvproxy.base.types import Headers

#: Of an answer, or of one event: more is not kept.
MAX_BYTES = 4 * 1024 * 1024
#: The events with a whole response; it is the last member of each.
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete")


class Response(msgspec.Struct):
    """Its members that matter here."""

    id: str
    output: list[Raw] = []


class _Item(msgspec.Struct):
    type: str = ""


class _Event(msgspec.Struct):
    response: Raw


_decode_response = msgspec.json.Decoder(Response).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_item = msgspec.json.Decoder(_Item).decode


class AnswerReader:
    """Takes an answer piece by piece; `whole` is the response once it is there."""

    def __init__(self) -> None:
        self.whole: bytes | None = None
        self.too_large = False
        self._streamed: bool | None = None  # None: an answer that is not kept
        self._rest = b""

    def begin(self, status: int, headers: Headers) -> None:
        """Take the head."""
        sent = dict(headers)
        if status == 200 and b"content-encoding" not in sent:
            kind = sent.get(b"content-type", b"").partition(b";")[0].strip()
            self._streamed = {b"application/json": False, b"text/event-stream": True}.get(kind)

    def add(self, piece: bytes, *, last: bool) -> None:
        """Take the next piece."""
        if self._streamed is None:
            return
        rest = self._rest + piece
        if self._streamed:
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event.startswith(_LAST_EVENTS):
                    self.whole = _response_of(event)
        elif last:
            self.whole, rest = rest, b""
        if len(rest) > MAX_BYTES:
            self._streamed = None
            self.too_large = True
            rest = b""
        self._rest = rest


def _response_of(event: bytes) -> bytes | None:
    data = event.partition(b"\ndata:")[2]
    try:
        return bytes(_decode_event(data).response)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_response(whole: bytes) -> Response | None:
    """Return the response without its reasoning, which is no part of the next prompt; None: it cannot be read."""
    try:
        response = _decode_response(whole)
        response.output = [one for one in response.output if _decode_item(one).type != "reasoning"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return response if response.id else None
