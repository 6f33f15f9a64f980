"""From the body of a chat request to what `/tokenize` and `/render` want, without re-serialising its parts. Pure."""

from __future__ import annotations

import msgspec

_Fields = dict[str, msgspec.Raw]

#: Fields of a chat request that `/tokenize` knows under the same name and that shape the prompt.
_TOKENIZE_FIELDS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
)

_DECODER = msgspec.json.Decoder(_Fields)


def tokenize_body(model: str, body: bytes) -> bytes:
    """The `/tokenize` request for a chat body (raw JSON); `model` replaces the body's unless empty.

    Chat feeds `reasoning_effort` and `documents` to the template and derives `enable_thinking` from the former;
    `/tokenize` does not, so they are put into `chat_template_kwargs`. Raises ValueError for a body without messages.
    """
    fields = _fields(body)
    if "messages" not in fields:
        raise ValueError("not a chat request: no messages")
    request = {name: fields[name] for name in _TOKENIZE_FIELDS if name in fields}
    kwargs = _template_kwargs(fields)
    if kwargs:
        request["chat_template_kwargs"] = msgspec.Raw(msgspec.json.encode(kwargs))
    return _with_model(model, fields, request)


def render_body(model: str, body: bytes) -> bytes:
    """The `/render` request for a chat body (raw JSON): the body itself, `model` replaced unless empty."""
    if not model:
        return body
    fields = _fields(body)
    return _with_model(model, fields, fields)


def _fields(body: bytes) -> _Fields:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("not a JSON object") from None


def _with_model(model: str, fields: _Fields, request: _Fields) -> bytes:
    named = {"model": msgspec.Raw(msgspec.json.encode(model))} if model else {}
    if not model and "model" in fields:
        named["model"] = fields["model"]
    return msgspec.json.encode({**request, **named})


def _template_kwargs(fields: _Fields) -> _Fields:
    """`chat_template_kwargs` as the chat endpoint would complete them; empty when it would add nothing."""
    added = {name: fields[name] for name in ("documents", "reasoning_effort") if _given(fields.get(name))}
    if not added:
        return {}
    given = fields.get("chat_template_kwargs")
    kwargs = _fields(bytes(given)) if given is not None and _given(given) else {}
    if "reasoning_effort" in added and "enable_thinking" not in kwargs:
        thinks = bytes(added["reasoning_effort"]).strip() != b'"none"'
        added["enable_thinking"] = msgspec.Raw(b"true" if thinks else b"false")
    return {**kwargs, **added}


def _given(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value).strip() != b"null"
