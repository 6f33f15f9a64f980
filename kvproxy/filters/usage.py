"""The engine's own token counts, read once from the end of a response and never per chunk."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

#: A count beyond reason makes its whole usage unbelievable.
MAX_COUNT = 2**31
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] | None

#: A usage object is small; one that claims to be larger is not searched further.
_MAX_USAGE_BYTES = 4096
#: Nor has it more braces, and what follows so many places that look like one is not searched either.
_MAX_BRACES = 32
_MAX_PLACES = 256


class _Details(msgspec.Struct):
    cached_tokens: _Count = None


class _Usage(msgspec.Struct):
    """OpenAI's chat and completions names, the responses API's, and Anthropic's."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None

    def prompt(self) -> int | None:
        """The whole prompt. Anthropic's `input_tokens` leaves out what was read from or written to the cache."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        whole = self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return min(whole, MAX_COUNT)


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response, each from 0 to `MAX_COUNT`; None where the engine did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


_NOTHING = _Usage()
_NO_COUNTS = (None, None, None, None)
_decoder = msgspec.json.Decoder(_Usage)


def _object_at(data: bytes, start: int) -> bytes | None:
    """The JSON object that begins at `start`. Usage objects hold numbers and nulls only, so braces can be counted."""
    end, limit = start, start + _MAX_USAGE_BYTES
    for _ in range(_MAX_BRACES):
        end = data.find(b"}", end, limit) + 1
        if not end:
            return None
        if data.count(b"{", start, end) == data.count(b"}", start, end):
            return data[start:end]
    return None


def _decode(data: bytes, key: int) -> _Usage | None:
    brace = data.find(b"{", key + 7, key + 16)
    raw = None if brace < 0 else _object_at(data, brace)
    if raw is None:
        return None
    try:
        usage = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.input_tokens, usage.output_tokens)
    return None if counts == _NO_COUNTS else usage


def read_usage(tail: bytes, head: bytes = b"") -> Usage | None:
    """Usage from the last bytes of a response (`tail`), or where Anthropic streams put it first (`head`).

    The last `"usage"` object that can be decoded wins; None when there is none.
    """
    found = None
    position = len(tail)
    for _ in range(_MAX_PLACES):
        position = tail.rfind(b'"usage"', 0, position)
        if position < 0 or (found := _decode(tail, position)) is not None:
            break
    first = None
    if head and (position := head.find(b'"usage"')) >= 0:
        first = _decode(head, position)
    if found is None and first is None:
        return None
    if first is None and found is not None and found.prompt_tokens is not None:  # OpenAI's, nearly all there are
        details = found.prompt_tokens_details
        cached = found.cache_read_input_tokens if details is None else details.cached_tokens
        return Usage(found.prompt_tokens, _most(cached, found.prompt_tokens), found.completion_tokens)
    return _merge(found or _NOTHING, first or _NOTHING)


def _merge(last: _Usage, first: _Usage) -> Usage:
    details = last.prompt_tokens_details or last.input_tokens_details or first.input_tokens_details
    cached = None if details is None else details.cached_tokens
    if cached is None:
        cached = _either(last.cache_read_input_tokens, first.cache_read_input_tokens)
    completion = _either(last.completion_tokens, _either(last.output_tokens, first.output_tokens))
    prompt = _either(last.prompt(), first.prompt())
    return Usage(prompt, _most(cached, prompt), completion)


def _most(cached: int | None, prompt: int | None) -> int | None:
    """No more of a prompt is cached than it has."""
    return cached if cached is None or prompt is None or cached <= prompt else prompt


def _either(a: int | None, b: int | None) -> int | None:
    return b if a is None else a
