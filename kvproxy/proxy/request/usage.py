"""End of an answer, read once and never per chunk: the engine's token counts, and the error events of streams (also
those for the client of a broken stream)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias

import msgspec

#: A larger count makes its whole usage invalid.
MAX_COUNT = 2**31
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] | None

#: Bounds per answer on the places tried that look like one, and on the bytes read behind them.
_MAX_PLACES = 256
_MAX_READ_BYTES = 64 * 1024
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


#: Text in any error event; generated text cannot contain it, since quotes in a JSON string are escaped.
ERROR_MARK = b'"error"'

#: A longer data line is not an error.
_MAX_ERROR_BYTES = 64 * 1024

#: A response has its id first, and a stream of it in its first event.
_ID_BYTES = 1024
_response_id = re.compile(rb'"id"\s{0,2}:\s{0,2}"(resp_[\w.-]{1,120})"').search

#: Calls of tools of chat's, Anthropic's and the responses API's; generated text cannot contain them.
_call = re.compile(
    rb'"(?:tool_calls|function_call)"\s?:(?!\s?(?:\[\]|null))'
    rb'|"(?:type|finish_reason|stop_reason)"\s?:\s?"(?:tool_calls|tool_use|\w{1,30}_call)"'
).search

_STATUS_KEYS = ("code", "status", "status_code", "http_status_code")
_NAME_KEYS = ("type", "code", "error_type")

#: Error types that name a client's mistake, without "error" and non-letters: OpenAI's, Anthropic's, vLLM's and
#: SGLang's, TGI's.
_CLIENT_ERRORS = frozenset(
    {
        *("invalidrequest", "badrequest", "notfound", "authentication", "unauthorized", "permission", "forbidden"),
        *("permissiondenied", "requesttoolarge", "unprocessableentity", "validation", "value", "billing"),
        *("ratelimit", "ratelimitexceeded", "contextlengthexceeded", "invalidprompt", "contentfilter"),
    }
)
#: Types of the responses API's events (and Anthropic's) that are errors.
_ERROR_KINDS = ("error", "response.failed")
_BUSY_ERRORS = frozenset({"overloaded", "serviceunavailable"})


#: Kinds of media in one prompt, at most.
_MAX_MODALITIES = 16
#: SGLang's sources of cached tokens, if a request asks for `return_cached_tokens_details`.
_SGLANG_TIERS = ("device", "host", "storage")


class _Details(msgspec.Struct):
    cached_tokens: _Count = None
    multimodal_tokens: Any = None  # vLLM's, by modality

    def media(self) -> int | None:
        """Tokens of all media; None where they are not reported."""
        if not isinstance(self.multimodal_tokens, dict) or len(self.multimodal_tokens) > _MAX_MODALITIES:
            return None
        counts = [_as_count(count) for count in self.multimodal_tokens.values()]
        known = [count for count in counts if count is not None]
        return _sum(known) if known and len(known) == len(counts) else None


class _Usage(msgspec.Struct):
    """OpenAI's chat and completions names, the responses API's, Anthropic's, DeepSeek's, and those of SGLang's
    `meta_info`."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None
    cached_tokens: _Count = None
    prompt_cache_hit_tokens: _Count = None

    def prompt(self) -> int | None:
        """Return the whole prompt. Anthropic's `input_tokens` leaves out what was read from or written to the cache."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        whole = self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return min(whole, MAX_COUNT)

    def media(self) -> int | None:
        """Tokens of the prompt's media."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return None if details is None else details.media()

    def cached(self) -> int | None:
        """Return what of the prompt was cached."""
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is not None and details.cached_tokens is not None:
            return details.cached_tokens
        return _either(_either(self.cache_read_input_tokens, self.cached_tokens), self.prompt_cache_hit_tokens)


class _Answer(msgspec.Struct):
    """A whole answer, an event of a stream, or what is left of either from its counts on."""

    usage: _Usage | None = None
    timings: Any = None  # llama.cpp's, behind its usage
    sglext: Any = None  # SGLang's, there as well
    meta_info: _Usage | None = None
    index: int | None = None  # index among several prompts

    def counts(self) -> _Usage | None:
        """None where it has none."""
        said = self.usage or self.meta_info
        if said is None or self.index is not None:
            return None
        cached = said.cached()
        said.cached_tokens = self._cached_elsewhere() if cached is None else cached
        if said.prompt_tokens is None and said.completion_tokens is None:
            return None if said.input_tokens is None and said.output_tokens is None else said
        return said

    def _cached_elsewhere(self) -> int | None:
        """Return the cached tokens if reported outside the usage."""
        if self.meta_info is not None:
            return self.meta_info.cached()
        if isinstance(self.timings, dict):
            return _as_count(self.timings.get("cache_n"))
        tiers = self.sglext.get("cached_tokens_details") if isinstance(self.sglext, dict) else None
        if not isinstance(tiers, dict):
            return None
        found = [count for tier in _SGLANG_TIERS if (count := _as_count(tiers.get(tier))) is not None]
        return min(sum(found), MAX_COUNT) if found else None


class _Wrapped(msgspec.Struct):
    """An event whose counts are one level down: the responses API's, and Anthropic's `message_start`."""

    response: _Answer | None = None
    message: _Answer | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response, each from 0 to `MAX_COUNT`; None if the engine did not report it."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    media_tokens: int | None = None  # of the prompt's


_NOTHING = _Usage()
#: Errors of a decoder.
INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_answer = msgspec.json.Decoder(_Answer)
_answers = msgspec.json.Decoder(list[_Answer])
_wrapped = msgspec.json.Decoder(_Wrapped)


def read_usage(tail: bytes, head: bytes = b"", *, native: bool = False) -> Usage | None:
    """Usage from the last bytes of a response (`tail`), or where Anthropic streams put it first (`head`).

    Counts are trusted only where the API has them, since an answer may echo what its client chose (tools, metadata):
    at the top of an answer or an event, or of the `response` in an event. The last ones win; None when there are none.
    With `native` those of SGLang's own API count too.
    """
    found = find_counts(tail, b'"usage"')
    first = _started(head) if head else None
    if found is None and first is None and native:
        if tail.startswith(b"["):
            counts = _of_all(tail)
            return None if counts is None else _merge(counts, _NOTHING)
        found = find_counts(tail, b'"meta_info"')
    if found is None and first is None:
        return None
    return _merge(_NOTHING if found is None else found[0], first or _NOTHING)


def find_counts(tail: bytes, name: bytes) -> tuple[_Usage, int, bytes, bool] | None:
    """Return the counts of the last member of this name at the right level; where it is, what begins there, up to the
    end of its answer or event; and whether it may stand one level down."""
    position = len(tail)
    left = _MAX_READ_BYTES
    for _ in range(_MAX_PLACES):
        position = tail.rfind(name, 0, position)
        if position < 0:
            return None
        line = tail.rfind(b"\n", 0, position) + 1
        streamed = tail.startswith(b"data:", line) or (not line and tail.endswith(_EVENT_ENDS))
        end = tail.find(b"\n", position) if streamed else -1
        rest = tail[position:end] if end >= 0 else tail[position:]
        left -= len(rest)
        if left < 0:
            return None
        wraps = streamed and (not line or tail.find(b'"response"', line, position) >= 0)
        if (counts := _read_counts(rest, wraps=wraps)) is not None:
            return counts, position, rest, wraps
    return None


def _read_counts(rest: bytes, *, wraps: bool) -> _Usage | None:
    """Return the counts that `rest`, the end of an answer, begins with: with one brace before it, it parses only if
    they are at the top, and with two only if they are one level down."""
    if wraps:
        try:
            response = _wrapped.decode(b'{"response":{' + rest).response
        except INVALID:
            pass
        else:
            return None if response is None else response.counts()
    try:
        return _answer.decode(b"{" + rest).counts()
    except INVALID:
        return None


def _started(head: bytes) -> _Usage | None:
    """Return the counts of Anthropic's `message_start`."""
    position = head.find(b'"usage"')
    line = head.rfind(b"\n", 0, position) + 1 if position >= 0 else 0
    if position < 0 or not head.startswith(b"data:", line):
        return None
    end = head.find(b"\n", position)
    end = len(head) if end < 0 else end
    if end - line > _MAX_READ_BYTES:
        return None
    try:
        message = _wrapped.decode(head[line + 5 : end]).message
    except INVALID:
        return None
    return None if message is None else message.counts()


def _of_all(whole: bytes) -> _Usage | None:
    """Return the sums over SGLang's answers to several prompts; None unless all of them are there."""
    if len(whole) > _MAX_READ_BYTES:
        return None
    try:
        said = [answer.meta_info for answer in _answers.decode(whole)]
    except INVALID:
        return None
    known = [counts for counts in said if counts is not None]
    if not known or len(known) < len(said):
        return None
    return _Usage(
        prompt_tokens=_sum(counts.prompt_tokens for counts in known),
        completion_tokens=_sum(counts.completion_tokens for counts in known),
        cached_tokens=_sum(counts.cached_tokens for counts in known),
    )


def _as_count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def _sum(counts: Iterable[int | None]) -> int:
    return min(sum(count or 0 for count in counts), MAX_COUNT)


def _merge(last: _Usage, first: _Usage) -> Usage:
    """Of both `cached_tokens` is what `counts` found, wherever it stood."""
    cached = last.cached_tokens
    if last.prompt_tokens is not None and first is _NOTHING:  # OpenAI's format, the usual one
        whole = last.prompt_tokens
        cached = whole if cached is not None and cached > whole else cached
        details = last.prompt_tokens_details
        media = None if details is None or details.multimodal_tokens is None else _most(details.media(), whole)
        return Usage(whole, cached, last.completion_tokens, media)
    cached = _either(cached, first.cached_tokens)
    completion = _either(last.completion_tokens, _either(last.output_tokens, first.output_tokens))
    prompt = _either(last.prompt(), first.prompt())
    return Usage(prompt, _most(cached, prompt), completion, _most(_either(last.media(), first.media()), prompt))


def _most(cached: int | None, prompt: int | None) -> int | None:
    """No more of a prompt is cached than it has."""
    return cached if cached is None or prompt is None or cached <= prompt else prompt


def _either(a: int | None, b: int | None) -> int | None:
    return b if a is None else a


def read_response_id(head: bytes) -> str:
    """Return the id that a response of the responses API begins with, streamed or not; "" if it does not."""
    found = _response_id(head, 0, _ID_BYTES)
    return "" if found is None else found[1].decode()


def calls_tool(tail: bytes) -> bool:
    """Return whether an answer calls a tool, by its end."""
    # a quick look first: every call of a tool has one of these, and few other answers do
    return (b"_call" in tail or b"tool_use" in tail) and _call(tail) is not None


def error_status(events: bytes, *, first: bool = False) -> int | None:
    """Return the HTTP status that an error event among `events` amounts to; None if there is none.

    With `first` only the first event is looked at, else those in the last 64 KiB. An event that names no status counts
    as 500, or 400 where its type is one of a client's mistake.
    """
    events = events[:_MAX_ERROR_BYTES] if first else events[-_MAX_ERROR_BYTES:]
    if ERROR_MARK not in events:
        return None
    name = b""
    for line in events.splitlines():
        if line.startswith(b"event:"):
            name = line[6:].strip()
        elif line.startswith(b"data:"):
            status = _status_of(line[5:], name) if ERROR_MARK in line and len(line) <= _MAX_ERROR_BYTES else None
            if status is not None or first:
                return status
        elif not line:
            name = b""
    return None


def _status_of(data: bytes, event: bytes) -> int | None:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(body, dict):
        return None
    kind = body.get("type")
    if kind == "response.failed" and isinstance(body.get("response"), dict):
        body = body["response"]
    error = body.get("error")
    if error is None and event != b"error" and kind not in _ERROR_KINDS and body.get("object") != "error":
        return None
    fields = {**body, **error} if isinstance(error, dict) else body
    return _numeric_status(fields) or _named_status(fields)


def _numeric_status(fields: dict[str, Any]) -> int | None:
    for key in _STATUS_KEYS:
        value = fields.get(key)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 8:
            value = int(value)
        if isinstance(value, int | float) and 400 <= value <= 599:
            return int(value)
    return None


def _named_status(fields: dict[str, Any]) -> int:
    names = [fields[key] for key in _NAME_KEYS if isinstance(fields.get(key), str)]
    plain = {re.sub("[^a-z]", "", name[:64].lower()).removesuffix("error") for name in names}
    if plain & _CLIENT_ERRORS:
        return 400
    return 503 if plain & _BUSY_ERRORS else 500
