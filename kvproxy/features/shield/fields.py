"""Finds the faults that a request body would meet, by the names and values of its members. Pure.

Values are read as engines read them: pydantic takes "5", 5.0 and 5e0 for the integer 5, and "yes" for true. Of a name
that occurs twice each value counts, since parsers differ in which one they take.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kvproxy.features.shield.rules import Rule

#: OpenAI's own API takes up to 128, vLLM since its fix up to 16,384.
MAX_N = 1024
#: A longer value of a watched member counts as harmful: it is not decoded.
MAX_VALUE_BYTES = 128 * 1024
_MAX_REGEX_CHARS = 4096
#: A shorter value is searched sooner than compared. So many longer ones are remembered.
_LONG_BYTES = 1024
_REMEMBERED = 16
_MAX_DEPTH = 64

Members = Iterable[tuple[str, bytes]]  # names, and values as in the body
Decoded = Iterable[tuple[str, Any]]
Look = Callable[[Any, str], Iterator[Rule]]


class _Object(list[tuple[str, Any]]):
    """A JSON object with all its members, duplicates included."""

    def all_of(self, name: str) -> list[Any]:
        """Every value of that name."""
        return [value for own, value in self if own == name]


class _Undecoded:
    """A value that was not decoded: too long, too deep or no JSON."""


_UNDECODED = _Undecoded()


def decode_value(value: bytes) -> Any:
    """Return the value as Python's parser reads it, objects with all their members."""
    if len(value) > MAX_VALUE_BYTES:
        return _UNDECODED
    return _decode_text(value.decode("utf-8", "surrogatepass"))


def _decode_text(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError):
        return _UNDECODED


def find_rules(members: Members, path: str) -> set[Rule]:
    """Return the faults that a body with these watched members would meet at an engine that has them."""
    rules: set[Rule] = set()
    decoded: list[tuple[str, Any]] = []
    for name, value in members:
        if name in FORMATS:
            if has_bad_pattern(value):
                rules.add(Rule.STRUCTURED_OUTPUT)
        elif name in WATCHED:
            decoded.append((name, decode_value(value)))
    return rules | _find_decoded(decoded, path)


def _find_decoded(members: Decoded, path: str) -> set[Rule]:
    members = list(members)
    rules = {rule for name, value in members for rule in _look(name, value, path)}
    if _echoes_logprobs(members, path):
        rules.add(Rule.PROMPT_LOGPROBS)
    if _has_many_prompts(members):
        rules.add(Rule.KV_TRANSFER_PARAMS)
    return rules


def _look(name: str, value: Any, path: str) -> Iterator[Rule]:
    if value is not None and (look := _LOOKS.get(name)) is not None:
        yield from look(value, path)


def _n(value: Any, _: str) -> Iterator[Rule]:
    if value is _UNDECODED or _number(value) > MAX_N:
        yield Rule.HUGE_N


def _number(value: Any) -> float:
    """0 where no engine takes it for a number."""
    if isinstance(value, str):
        value = value.strip().replace("_", "")
        if len(value) > MAX_N:
            return float("inf")
    try:
        return 0.0 if isinstance(value, bool | list) or value is _UNDECODED else float(value)
    except (ValueError, TypeError):
        return 0.0
    except OverflowError:
        return float("inf")


def _is_true(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("1", "true", "t", "yes", "y", "on")
    return value is _UNDECODED or (not isinstance(value, list) and value is not None and bool(value))


def _prompt_logprobs(value: Any, _: str) -> Iterator[Rule]:
    yield Rule.PROMPT_LOGPROBS


def _echoes_logprobs(members: Decoded, path: str) -> bool:
    """Return True if logprobs of an echoed prompt are requested. A chat's `top_logprobs` defaults to 0, which engines
    take as a request."""
    if not any(name == "echo" and _is_true(value) for name, value in members):
        return False
    return "/chat/" in path or any(name == "logprobs" and value is not None for name, value in members)


def _prompt_embeds(value: Any, _: str) -> Iterator[Rule]:
    yield Rule.PROMPT_EMBEDS


def _chat_template(value: Any, path: str) -> Iterator[Rule]:
    yield from _template_rules(path)


def _chat_template_kwargs(value: Any, path: str) -> Iterator[Rule]:
    if value is _UNDECODED:
        yield from _template_rules(path)
    elif isinstance(value, _Object):
        if any(one is not None for one in value.all_of("chat_template")):
            yield from _template_rules(path)
        if any(map(_is_true, value.all_of("tokenize"))):
            yield Rule.CHAT_TEMPLATE


def _template_rules(path: str) -> Iterator[Rule]:
    yield Rule.CHAT_TEMPLATE
    if "/responses" in path or "/messages" in path:
        yield Rule.RESPONSES_CHAT_TEMPLATE


def _sampling_params(value: Any, path: str) -> Iterator[Rule]:
    """vLLM's own API, and SGLang's, nest them."""
    if value is _UNDECODED:
        yield Rule.UNREADABLE
    elif isinstance(value, _Object):
        yield from _find_decoded(value, path)


def _kv_transfer_params(value: Any, _: str) -> Iterator[Rule]:
    if not isinstance(value, _Object) or _is_incomplete(value):
        yield Rule.KV_TRANSFER_PARAMS


_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_request_id", "remote_host", "remote_port")
_MAX_REMOTE_SIZE = 1024  # ranks


def _is_incomplete(params: _Object) -> bool:
    """Mooncake pairs both sides by a `transfer_id` instead."""
    if any(_number(size) > _MAX_REMOTE_SIZE for name in ("tp_size", "pp_size") for size in params.all_of(name)):
        return True
    if not any(map(_is_true, params.all_of("do_remote_prefill"))) or params.all_of("transfer_id"):
        return False
    return any(all(value is None for value in params.all_of(name)) for name in _REMOTE)


def _has_many_prompts(members: Decoded) -> bool:
    """Return a completion with several prompts, of which each would pull the blocks of one."""
    if not any(name == "kv_transfer_params" and value is not None for name, value in members):
        return False
    prompts = [value for name, value in members if name == "prompt" and isinstance(value, list)]
    return any(isinstance(one, str | list) for prompt in prompts for one in prompt[1:2])


def _vllm_xargs(value: Any, path: str) -> Iterator[Rule]:
    if value is _UNDECODED:
        yield Rule.KV_TRANSFER_PARAMS
    elif isinstance(value, _Object):
        for one in value.all_of("kv_transfer_params"):
            yield from _look("kv_transfer_params", one, path)


# Constraints that pass the API server and fail in the engine.


def _structured_outputs(value: Any, _: str) -> Iterator[Rule]:
    if value is _UNDECODED:
        yield Rule.STRUCTURED_OUTPUT
    elif isinstance(value, _Object):
        for name, one in value:
            if one is not None and (fails := _CONSTRAINTS.get(name)) is not None and fails(one):
                yield Rule.STRUCTURED_OUTPUT


def _guided(name: str) -> Look:
    def look(value: Any, _: str) -> Iterator[Rule]:
        if _CONSTRAINTS[name](value):
            yield Rule.STRUCTURED_OUTPUT

    return look


def has_bad_pattern(value: bytes) -> bool:
    """Return True if a schema anywhere in `tools`, `response_format` or `text` has a pattern that `fails_as_regex`."""
    if not may_hold_pattern(value):
        return False
    found = _PATTERN.findall(value)
    return any(fails_as_regex(_decode_text(one.decode("utf-8", "surrogatepass"))) for one in found)


def may_hold_pattern(value: bytes) -> bool:
    """Return the cheap look before."""
    return b'"pattern"' in value or (b"\\" in value and b"\\u00" in value)


class PlainValues:
    """Long values without a pattern that were seen last: agents send the same tools with every turn."""

    def __init__(self) -> None:
        self._seen: deque[bytes] = deque(maxlen=_REMEMBERED)

    def has_pattern(self, value: bytes) -> bool:
        """Return False for a value that surely has none."""
        if value in self._seen:
            return False
        if may_hold_pattern(value):
            return True
        if _LONG_BYTES <= len(value) <= MAX_VALUE_BYTES:
            self._seen.append(value)
        return False


_PATTERN = re.compile(
    b'"'
    + b"".join(b"(?:%c|\\\\u00(?i:%02x))" % (letter, letter) for letter in b"pattern")
    + rb'"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*+")',
    re.DOTALL,
)


def fails_as_regex(value: Any) -> bool:
    """Return True if the engines' compilers may disagree on it: a NUL, empty alternatives, groups other than `(?:`,
    references to groups, boundaries, or no regular expression at all."""
    if not isinstance(value, str):
        return value is _UNDECODED
    if "\0" in value or len(value) > _MAX_REGEX_CHARS or _ODD_ESCAPE.search(value):
        return True
    plain = _CLASS.sub("x", _ESCAPE.sub("x", value))
    return plain.count("(") != plain.count(")") or "[" in plain or _ODD_GROUP.search(plain) is not None


_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ODD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[0-9bBAZzGkKpP]|\Z)")
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_ODD_GROUP = re.compile(
    r"\(\?(?!:)"  # looks ahead or behind, names, flags
    r"|(?:^\^?|\((?:\?:)?|\|)\||\|(?:\)|\$?$)|\((?:\?:)?\)"  # an empty alternative or group
    r"|(?:^\^?|\(\?:|\((?!\?)|\|)[*+?]"  # a quantifier without an operand
)


def _fails_as_grammar(value: Any) -> bool:
    """No rules, one rule twice, or none to begin with."""
    if not isinstance(value, str) or len(value) > MAX_VALUE_BYTES:
        return value is _UNDECODED or isinstance(value, str)
    names = _EBNF_RULE.findall(value) if "::=" in value else _LARK_RULE.findall(value)
    return len(set(names)) != len(names) or ("root" if "::=" in value else "start") not in names


_EBNF_RULE = re.compile(r"^[ \t]*([\w.-]{1,200})[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^[ \t]*[?!]?(\w{1,200})(?:\.\d+)?[ \t]*:", re.MULTILINE)


def _fails_as_schema(value: Any) -> bool:
    """Return True for an invalid schema, which may come as text."""
    if isinstance(value, str):
        value = _decode_text(value) if len(value) <= MAX_VALUE_BYTES else _UNDECODED
    return value is _UNDECODED or not isinstance(value, _Object | bool) or _holds_bad_pattern(value)


def _holds_bad_pattern(value: Any) -> bool:
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            return True
        if isinstance(one, _Object):
            if any(isinstance(pattern, str) and fails_as_regex(pattern) for pattern in one.all_of("pattern")):
                return True
            waiting += [(inner, depth + 1) for _, inner in one]
        elif isinstance(one, list):
            waiting += [(inner, depth + 1) for inner in one]
    return False


def _fails_as_choice(value: Any) -> bool:
    return value is _UNDECODED or (isinstance(value, list) and (not value or "" in value))


_CONSTRAINTS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "json": _fails_as_schema,
        "json_object": lambda value: not _is_true(value),
        "regex": fails_as_regex,
        "choice": _fails_as_choice,
        "grammar": _fails_as_grammar,
        "structural_tag": _fails_as_schema,
    }
)
_LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "n": _n,
        "prompt_logprobs": _prompt_logprobs,
        "prompt_embeds": _prompt_embeds,
        "chat_template": _chat_template,
        "chat_template_kwargs": _chat_template_kwargs,
        "sampling_params": _sampling_params,
        "kv_transfer_params": _kv_transfer_params,
        "vllm_xargs": _vllm_xargs,
        "structured_outputs": _structured_outputs,
        **{f"guided_{name}": _guided(name) for name in ("json", "json_object", "regex", "choice", "grammar")},
        "structural_tag": _guided("structural_tag"),
    }
)
#: Members that hold schemas; those that can be harmful alone; and those whose values are examined beside these.
FORMATS = frozenset({"response_format", "text", "tools"})
TELLING = frozenset(_LOOKS) | FORMATS | {"echo"}
WATCHED = TELLING | {"logprobs", "prompt"}
