"""The body of a prefill leg: the client's prompt, and one token. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvproxy.base.types import RequestKind

Names = dict[str, msgspec.Raw]

_decode = msgspec.json.Decoder(Names).decode

#: APIs whose requests may go in legs, and the member that bounds the answer where the body has none.
LENGTHS: Mapping[RequestKind, str] = {
    RequestKind.CHAT: "max_tokens",
    RequestKind.COMPLETION: "max_tokens",
    RequestKind.MESSAGES: "max_tokens",
    RequestKind.RESPONSES: "max_output_tokens",
}
_ALL_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
#: About the answer alone, and in the way of one token.
_DROPPED = ("stream_options", "min_tokens", "min_completion_tokens")
#: Members, by which the answer needs more than the prompt's KV, and values that are none of that.
_WHOLE = {
    "n": (b"1",),
    "best_of": (b"1",),
    "echo": (b"false",),
    "background": (b"false",),
    "use_beam_search": (b"false",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "input_embeds": (),
}
#: Members that a trusted client may set; it meant them, and of two the engine would read its own, which is the later.
_OF_LEGS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_NULL = b"null"


def read_body(body: bytes, kind: RequestKind) -> Names | None:
    """Return the members of a body that may go in legs; None: it goes as a whole."""
    if kind not in LENGTHS:
        return None
    try:
        names = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if any(name in names for name in _OF_LEGS):
        return None
    for name, harmless in _WHOLE.items():
        value = names.get(name)
        if value is not None and bytes(value) not in (_NULL, *harmless):
            return None
    return None if _has_several_prompts(names) else names


def _has_several_prompts(names: Names) -> bool:
    """Return whether each of several prompts would pull the blocks of one."""
    prompt = bytes(names.get("prompt", b"")).strip()
    return prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b'"', b"[")


def shorten(names: Names, kind: RequestKind) -> Names:
    """Return the members of a request for one token, which is not streamed: engines give the handle in whole answers
    alone."""
    short = {name: value for name, value in names.items() if name not in _DROPPED}
    short["stream"] = _FALSE
    short[LENGTHS[kind]] = _ONE
    for name in _ALL_LENGTHS:
        if name in short:
            short[name] = _ONE
    if kind is RequestKind.RESPONSES:
        short["store"] = _FALSE
    return short


def encode(names: Mapping[str, msgspec.Raw]) -> bytes:
    """Return the body with these members."""
    return msgspec.json.encode(names)
