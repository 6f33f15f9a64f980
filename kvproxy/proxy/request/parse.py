"""Parses an inference body once, only as deep as needed, without touching its bytes. Pure.

Engines read these bodies with pydantic's lenient rules ("true" and 1 are booleans, "100" and 100.0 are integers), and
so does this; anything unreadable is left to the engine. The result is bounded for any body: names in characters, parts
in number, the prompt in bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_hexdigest

from kvproxy.base.json_scan import (
    MAX_DECODED_BYTES,
    Members,
    Span,
    Steps,
    Unreadable,
    find_items,
    find_members,
    run_at_once,
    run_in_turns,
)
from kvproxy.base.types import InferenceRequest, Prompt, RequestKind
from kvproxy.cache.media.cut import cut_in_steps, may_hold_media
from kvproxy.proxy.request.fields import (
    NAMING,
    NO_RAW,
    Chat,
    Common,
    Completion,
    Embeddings,
    Messages,
    Responses,
    is_request_id,
)
from kvproxy.proxy.request.session import NO_CALLER, Caller

#: Longer names of models and cache salts are replaced by a digest.
MAX_NAME = 256
#: Messages kept apart; all further ones are one part.
MAX_PARTS = 4096
#: Bytes of a prompt that are kept and hashed, a million tokens; the rest is a digest and a length.
MAX_PROMPT_BYTES = 4 * 1024 * 1024
#: Longest body whose lists are decoded as one: its items cannot take more than milliseconds.
_LISTED_BYTES = 256 * 1024
#: A longer scalar is represented by its digest.
_MAX_SCALAR_BYTES = 64 * 1024
_MAX_TOKENS = 2**31
_SYSTEM_PROMPTS = ("system", "instructions")  # fields

#: First items of a list; the decoder skips all that follow. If the last one is set, there are more.
_First: Any = msgspec.defstruct(
    "_First", [(f"item{index}", Raw, NO_RAW) for index in range(MAX_PARTS + 1)], array_like=True, gc=False
)
_raw_list = msgspec.json.Decoder(list[Raw])
_raw_first = msgspec.json.Decoder(_First)


class _TooMany(ValueError):
    """More items than there are parts."""


def _none(name: str) -> bool:
    return False


class _Reader:
    """Decodes the bodies of one kind."""

    def __init__(
        self,
        kind: RequestKind,
        struct: type[Common],
        *,
        single: str = "",
        listed: str = "",
        max_tokens: tuple[str, ...] = (),
    ) -> None:
        self._kind = kind
        self._struct = struct
        self._decode = msgspec.json.Decoder(struct, strict=False).decode
        many = [(listed, _First | None, None)] if listed else []
        large: Any = msgspec.defstruct(f"{struct.__name__}Large", many, bases=(struct,), gc=False)
        self._decode_large: Callable[[bytes], Common] = msgspec.json.Decoder(large, strict=False).decode
        self._single = single  # field with the whole prompt as one value
        self._listed = listed  # field with one value per message
        self._max_tokens = max_tokens  # names of the limit, the one that wins first
        fields = msgspec.structs.fields(struct)
        raw = [field.name for field in fields if field.type is Raw and field.name != single]
        raw.sort(key=lambda name: name not in _SYSTEM_PROMPTS)  # most templates print it in front of the tools
        self._names = frozenset(field.name for field in fields)
        self._scalars = {field.name: field.type for field in fields if field.type is not Raw and field.name != listed}
        self._ids = tuple([name for name in ("previous_response_id", "conversation") if name in raw])
        self._shaping = {name: name.encode() + b":" for name in raw}
        self._shapes: Callable[[Common], tuple[Raw, ...]] = attrgetter(*raw)
        self._unshaped = (NO_RAW,) * len(raw)
        self._naming = attrgetter(*[name for name in NAMING if name in self._names])
        self._unnamed = self._naming(struct())

    def read(self, body: bytes, caller: Caller) -> InferenceRequest:
        """Everything, at once. Raises what a decoder raises, and _TooMany."""
        data = self._decode(body) if len(body) <= _LISTED_BYTES else self._decode_large(body)
        shape = b"" if self._shapes(data) == self._unshaped else self._shape(data)
        return self._request(data, Prompt(shape, self._parts(data)), caller)

    def read_rest(
        self, rest: bytes, caller: Caller, *, stand_in: bytes, earlier: tuple[bytes, ...]
    ) -> InferenceRequest | None:
        """Return the same of a body with `stand_in` in place of its `earlier` messages; None if it does not come out
        as the first one."""
        data = self._decode(rest) if len(rest) <= _LISTED_BYTES else self._decode_large(rest)
        parts = self._parts(data)
        if not parts or parts[0] != stand_in:
            return None
        if len(earlier) + len(parts) - 1 > MAX_PARTS:
            raise _TooMany
        return self._request(data, Prompt(self._shape(data), earlier + parts[1:]), caller)

    def scan(
        self, body: bytes, caller: Caller, also: Callable[[str], bool] = _none
    ) -> Steps[tuple[InferenceRequest, Members]]:
        """Return the same in steps, and field by field: one that is of another type than expected counts as absent.
        With the members it read and those whose names are wanted `also`. Raises Unreadable."""
        names = self._names
        found = yield from find_members(body, lambda name: name in names or also(name))
        spans = {member.name: member.value for member in found.found}
        scalars: dict[str, Any] = {
            name: _scalar(body, spans[name], kind) for name, kind in self._scalars.items() if name in spans
        }
        scalars |= {name: _raw_scalar(body, spans[name]) for name in self._ids if name in spans}
        data = self._struct(**scalars)
        yield
        room = _Room(body)
        shape = [
            prefix + room.take(spans[name]) + b"\0"
            for name, prefix in self._shaping.items()
            if name in spans and not _is_null(body, spans[name])
        ]
        parts = []
        spans_of_parts = yield from self._scan_parts(body, spans)
        for span in spans_of_parts:
            if may_hold_media(body, span.start, span.end):
                cut = yield from cut_in_steps(body[span.start : span.end])
                if len(cut) < min(span.end - span.start, room.left):
                    parts.append(room.take_cut(cut))
                    continue
            if span.end - span.start > room.left:
                parts.append(room.take(Span(span.start, spans_of_parts[-1].end)))
                break
            parts.append(room.take(span))
        prompt = Prompt(b"".join(shape), tuple(parts), room.unread_bytes)
        return self._request(data, prompt, caller), found

    def _request(self, data: Common, prompt: Prompt, caller: Caller) -> InferenceRequest:
        model = data.model or ""
        salt = data.cache_salt
        named = self._naming(data) != self._unnamed
        session = caller.session or (data.session() if named else None)
        continues, continuable = data.history() if isinstance(data, Responses) else (None, False)
        limit: int | None = None
        for name in self._max_tokens:
            asked: int | None = getattr(data, name)
            if asked is not None and 0 <= asked <= _MAX_TOKENS:
                limit = asked
                break
        return InferenceRequest(
            self._kind,
            model if len(model) <= MAX_NAME else _digest(model),
            prompt,
            data.stream is True,
            limit,
            None if session is None else session.key,
            salt if salt is None or len(salt) <= MAX_NAME else _digest(salt),
            caller.client,
            None if session is None else session.parent,
            caller.ends,
            data.cache_group() if named else None,
            continues,
            continuable,
            data.retention_s() if named else None,
            request_id if (request_id := data.request_id) and is_request_id(request_id) else "",
            session is not None and session.of_user,
            data.hints() if named else None,
        )

    def _shape(self, data: Common) -> bytes:
        """NUL never occurs in JSON, so it ends a field without doubt."""
        pieces = []
        for prefix, raw in zip(self._shaping.values(), self._shapes(data), strict=True):
            if raw is not NO_RAW and (value := bytes(raw)) != b"null":
                pieces.append(prefix + value + b"\0")
        return b"".join(pieces)

    def _parts(self, data: Common) -> tuple[bytes, ...]:
        if self._listed and (messages := getattr(data, self._listed)):
            if type(messages) is list and len(messages) <= MAX_PARTS:
                return tuple(map(bytes, messages))
            return _as_parts(messages)
        value = bytes(getattr(data, self._single)) if self._single else b""
        if value in (b"", b"null"):
            return ()
        if self._kind is RequestKind.RESPONSES and value.startswith(b"["):
            return _as_parts(_raw_list.decode(value) if len(value) <= _LISTED_BYTES else _raw_first.decode(value))
        return (value,)

    def _scan_parts(self, body: bytes, spans: dict[str, Span]) -> Steps[list[Span]]:
        """As `_parts`."""
        listed = spans.get(self._listed)
        if listed is not None and body[listed.start : listed.start + 1] == b"[":
            found = yield from find_items(body, listed, MAX_PARTS)
            if found:
                return found
        single = spans.get(self._single)
        if single is None or _is_null(body, single):
            return []
        if self._kind is RequestKind.RESPONSES and body[single.start : single.start + 1] == b"[":
            return (yield from find_items(body, single, MAX_PARTS))
        return [single]


class _Room:
    """Hands out the texts of one prompt until they are as many bytes as are kept of one."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.left = MAX_PROMPT_BYTES
        self.unread_bytes = 0

    def take_cut(self, text: bytes) -> bytes:
        """Return a message whose media were cut out, for which there is room."""
        self.left -= len(text)
        return text

    def take(self, span: Span) -> bytes:
        """Return the text; what there is no room for is replaced by NUL and a digest, so that other texts
        stay others."""
        end = min(span.end, span.start + self.left)
        self.left -= end - span.start
        text = self._body[span.start : end]
        if end == span.end:
            return text
        self.unread_bytes += span.end - end
        return text + b"\0" + xxh3_128_hexdigest(memoryview(self._body)[end : span.end]).encode()


def _as_parts(messages: Any) -> tuple[bytes, ...]:
    """Return the bytes of a list's items, or of a `_First`. Raises _TooMany."""
    if type(messages) is not list:
        messages = msgspec.structs.astuple(messages)
        if messages[-1] is NO_RAW:
            messages = messages[: messages.index(NO_RAW)]
    if len(messages) > MAX_PARTS:
        raise _TooMany
    return tuple(map(bytes, messages))


def _is_null(body: bytes, span: Span) -> bool:
    return body[span.start : span.end] in (b"null", b"") if span.end - span.start <= len(b"null") else False


def _scalar(body: bytes, span: Span, kind: Any) -> Any:
    """Return the value there; None if it is none of that type. A long one is only digested."""
    if span.end - span.start > _MAX_SCALAR_BYTES:
        text = memoryview(body)[span.start : span.end]
        return xxh3_128_hexdigest(text) if body[span.start : span.start + 1] == b'"' else None
    try:
        return msgspec.json.decode(body[span.start : span.end], type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _raw_scalar(body: bytes, span: Span) -> Raw:
    """As it is there, if it is not long."""
    return NO_RAW if span.end - span.start > _MAX_SCALAR_BYTES else Raw(body[span.start : span.end])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_READERS = {
    RequestKind.CHAT: _Reader(
        RequestKind.CHAT, Chat, listed="messages", max_tokens=("max_completion_tokens", "max_tokens")
    ),
    RequestKind.COMPLETION: _Reader(RequestKind.COMPLETION, Completion, single="prompt", max_tokens=("max_tokens",)),
    RequestKind.RESPONSES: _Reader(RequestKind.RESPONSES, Responses, single="input", max_tokens=("max_output_tokens",)),
    RequestKind.EMBEDDINGS: _Reader(RequestKind.EMBEDDINGS, Embeddings, single="input", listed="messages"),
    RequestKind.MESSAGES: _Reader(RequestKind.MESSAGES, Messages, listed="messages", max_tokens=("max_tokens",)),
}


def parse_body(kind: RequestKind, body: bytes, *, caller: Caller = NO_CALLER) -> InferenceRequest | None:
    """Parse the facts the proxy needs from `body`; None if it is no JSON object, or over the bounds.

    The `caller` from the headers wins over the body. Blocks until done."""
    request = decode_body(kind, body, caller)
    if request is not None:
        return request
    try:
        return run_at_once(_READERS[kind].scan(body, caller))[0]
    except Unreadable:
        return None


async def read_body(
    kind: RequestKind, body: bytes, *, caller: Caller = NO_CALLER, pace: asyncio.Lock
) -> InferenceRequest | None:
    """As `parse_body`, with turns for other tasks where it takes long."""
    request = decode_body(kind, body, caller)
    return (await scan_body(kind, body, caller, pace=pace))[0] if request is None else request


def decode_body(kind: RequestKind, body: bytes, caller: Caller) -> InferenceRequest | None:
    """Return the same for nearly all bodies, within milliseconds; None if it has to be scanned."""
    if len(body) > MAX_DECODED_BYTES:
        return None
    try:
        return _READERS[kind].read(body, caller)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _TooMany):
        return None


def decode_rest(
    kind: RequestKind, rest: bytes, caller: Caller, *, stand_in: bytes, earlier: tuple[bytes, ...]
) -> InferenceRequest | None:
    """Return the same of a body with `stand_in` in place of its first messages, which are the `earlier` ones; None if
    all of it has to be read."""
    try:
        return _READERS[kind].read_rest(rest, caller, stand_in=stand_in, earlier=earlier)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _TooMany):
        return None


async def scan_body(
    kind: RequestKind, body: bytes, caller: Caller, *, pace: asyncio.Lock, also: Callable[[str], bool] = _none
) -> tuple[InferenceRequest, Members] | tuple[None, None]:
    """Return the same for all others, in steps, and the members found on the way: those that were read and those whose
    names are wanted `also`. Of those that share a `pace` one is scanned at a time."""
    try:
        return await run_in_turns(_READERS[kind].scan(body, caller, also), pace)
    except Unreadable:
        return None, None
