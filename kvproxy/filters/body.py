"""Parses an inference body once, only as deep as needed, without touching its bytes. Pure.

Engines read these bodies with pydantic's lenient rules ("true" and 1 are booleans, "100" and 100.0 are integers), and
so does this; whatever it cannot make sense of is left to the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import attrgetter

import msgspec
from msgspec import Raw

from kvproxy.types import InferenceRequest, Prompt, RequestKind

#: A longer session key is replaced by its digest, so that a client cannot make us keep what it likes.
MAX_SESSION_KEY = 128

_Key = str | int | None
_NO_RAW = Raw()


class _Common(msgspec.Struct, gc=False):
    """Fields every kind has. Null counts as absent."""

    model: str | None = None
    stream: bool | None = None
    session_id: _Key = None
    user: _Key = None
    prompt_cache_key: _Key = None
    cache_salt: str | None = None
    add_special_tokens: Raw = _NO_RAW
    truncate_prompt_tokens: Raw = _NO_RAW


class _Templated(_Common, gc=False):
    """What shapes a chat template besides the messages.

    `tool_choice` and `response_format` steer decoding and leave the prompt alone, so they are not among these.
    """

    tools: Raw = _NO_RAW
    documents: Raw = _NO_RAW
    chat_template: Raw = _NO_RAW
    chat_template_kwargs: Raw = _NO_RAW
    mm_processor_kwargs: Raw = _NO_RAW
    media_io_kwargs: Raw = _NO_RAW
    reasoning_effort: Raw = _NO_RAW
    add_generation_prompt: Raw = _NO_RAW
    continue_final_message: Raw = _NO_RAW


class _Chat(_Templated, gc=False):
    messages: list[Raw] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Completion(_Common, gc=False):
    prompt: Raw = _NO_RAW
    suffix: Raw = _NO_RAW
    prompt_embeds: Raw = _NO_RAW
    max_tokens: int | None = None


class _Responses(_Templated, gc=False):
    input: Raw = _NO_RAW
    instructions: Raw = _NO_RAW
    reasoning: Raw = _NO_RAW
    prompt: Raw = _NO_RAW
    previous_response_id: Raw = _NO_RAW
    conversation: Raw = _NO_RAW
    max_output_tokens: int | None = None


class _Embeddings(_Templated, gc=False):
    input: Raw = _NO_RAW
    messages: list[Raw] | None = None


class _Metadata(msgspec.Struct, gc=False):
    user_id: _Key = None


class _Messages(_Templated, gc=False):
    messages: list[Raw] = []
    system: Raw = _NO_RAW
    thinking: Raw = _NO_RAW
    output_config: Raw = _NO_RAW
    metadata: _Metadata | None = None
    max_tokens: int | None = None


_raw_list = msgspec.json.Decoder(list[Raw])


class _Reader:
    """Decodes the bodies of one kind."""

    def __init__(
        self,
        kind: RequestKind,
        struct: type[_Common],
        *,
        single: str = "",
        listed: str = "",
        max_tokens: tuple[str, ...] = (),
    ) -> None:
        self._kind = kind
        self._decode = msgspec.json.Decoder(struct, strict=False).decode
        self._single = single  # field with the whole prompt as one value
        self._listed = listed  # field with one value a message
        self._max_tokens = max_tokens  # names of the limit, the one that wins first
        raw = [field.name for field in msgspec.structs.fields(struct) if field.type is Raw and field.name != single]
        self._shaping = [name.encode() + b":" for name in raw]
        self._shapes: Callable[[_Common], tuple[Raw, ...]] = attrgetter(*raw)
        self._unshaped = (_NO_RAW,) * len(raw)

    def read(self, body: bytes, session: str) -> InferenceRequest:
        data = self._decode(body)
        return InferenceRequest(
            kind=self._kind,
            model=data.model or "",
            prompt=Prompt(shape=self._shape(data), parts=self._parts(data)),
            stream=data.stream is True,
            max_tokens=self._limit(data),
            session_key=_session_key(session, data),
            cache_salt=data.cache_salt,
        )

    def _shape(self, data: _Common) -> bytes:
        """NUL never occurs in JSON, so it ends a field without doubt."""
        shapes = self._shapes(data)
        if shapes == self._unshaped:
            return b""
        pieces = []
        for prefix, raw in zip(self._shaping, shapes, strict=True):
            if raw is not _NO_RAW and (value := bytes(raw)) != b"null":
                pieces.append(prefix + value + b"\0")
        return b"".join(pieces)

    def _parts(self, data: _Common) -> tuple[bytes, ...]:
        if self._listed and (messages := getattr(data, self._listed)):
            return tuple(map(bytes, messages))
        value = bytes(getattr(data, self._single)) if self._single else b""
        if value in (b"", b"null"):
            return ()
        if self._kind is RequestKind.RESPONSES and value.startswith(b"["):
            return tuple(map(bytes, _raw_list.decode(value)))
        return (value,)

    def _limit(self, data: _Common) -> int | None:
        for name in self._max_tokens:
            limit: int | None = getattr(data, name)
            if limit is not None and limit >= 0:
                return limit
        return None


def _session_key(header: str, data: _Common) -> str | None:
    user = data.metadata.user_id if isinstance(data, _Messages) and data.metadata is not None else data.user
    for value in (header, data.session_id, user, data.prompt_cache_key):
        if value is not None and (key := str(value)):
            return key if len(key) <= MAX_SESSION_KEY else hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return None


_READERS = {
    RequestKind.CHAT: _Reader(
        RequestKind.CHAT, _Chat, listed="messages", max_tokens=("max_completion_tokens", "max_tokens")
    ),
    RequestKind.COMPLETION: _Reader(RequestKind.COMPLETION, _Completion, single="prompt", max_tokens=("max_tokens",)),
    RequestKind.RESPONSES: _Reader(
        RequestKind.RESPONSES, _Responses, single="input", max_tokens=("max_output_tokens",)
    ),
    RequestKind.EMBEDDINGS: _Reader(RequestKind.EMBEDDINGS, _Embeddings, single="input", listed="messages"),
    RequestKind.MESSAGES: _Reader(RequestKind.MESSAGES, _Messages, listed="messages", max_tokens=("max_tokens",)),
}


def parse_body(kind: RequestKind, body: bytes, *, session: str = "") -> InferenceRequest | None:
    """What the proxy needs to know about `body`; None when it is not JSON or not of the expected types.

    `session` is the session header's value and wins over whatever the body says.
    """
    try:
        return _READERS[kind].read(body, session)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
