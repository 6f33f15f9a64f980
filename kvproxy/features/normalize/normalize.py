"""Filter `normalize`: rewrites what clients put into their prompts that keeps engines from reusing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, InferenceRequest, Prompt
from kvproxy.cache.prefix.shape_identity import fields_of, is_system
from kvproxy.cluster.routes import RouteTarget
from kvproxy.features.normalize.metrics import NormalizeMetrics
from kvproxy.features.normalize.settings import NormalizeRule, NormalizeSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import decode_body
from kvproxy.proxy.request.session import NO_CALLER

_MAX_ITEMS = 1024
#: Members of a name that are examined, at whatever depth.
_MAX_PLACES = 64
_HEADER = rb"x-anthropic-billing-header(?:[^\"\\]|\\[\"\\/bfrt]){0,1024}+"
_TEXT_BLOCK = rb'\{\s?"type"\s?:\s?"text"\s?,\s?"text"\s?:\s?"'
_SYSTEM_BEGINS = rb'(\{\s?"role"\s?:\s?"system"\s?,\s?"content"\s?:\s?)'
_is_header_block = re.compile(_TEXT_BLOCK + _HEADER + rb'"').match
_header_line = re.compile(b'"' + _HEADER + rb'\\n(?!")').match
_header_in_message = re.compile(
    _SYSTEM_BEGINS
    + rb"(?:(?P<text>\")"
    + _HEADER
    + rb"\\n(?!\")|(?P<list>\[)\s?"
    + _TEXT_BLOCK
    + _HEADER
    + rb'"\}\s?,\s?)'
).match
#: With the line ends before it, unless these may be something else that ends with a backslash.
_counters = re.compile(rb"(?:(?<!\\)(?:\\n)+)?<total_tokens>[^<\"\\]{1,64}</total_tokens>").sub
_COUNTER = b"<total_tokens>"
_is_empty_block = re.compile(_TEXT_BLOCK + rb'"').match

_decode_items = msgspec.json.Decoder(list[Raw]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Named(msgspec.Struct, frozen=True, gc=False):
    name: str = ""
    type: str = ""


class _Tool(_Named, frozen=True, gc=False):
    function: _Named = _Named()


_decode_tool = msgspec.json.Decoder(_Tool).decode


class Piece(NamedTuple):
    """A raw value of a body that rules look at: a field, or the message that is the chat's system prompt."""

    name: bytes  # of the field; b"messages": its first item
    value: bytes


Pieces = Sequence[Piece]


def pieces_of(prompt: Prompt) -> list[Piece]:
    """Return what rules look at."""
    pieces = []
    for field in fields_of(prompt.shape):
        name, _, value = field.partition(b":")
        if name in _FIELDS:
            pieces.append(Piece(name, value))
    if prompt.parts and is_system(prompt.parts[0]):
        pieces.append(Piece(b"messages", prompt.parts[0]))
    return pieces


_FIELDS = frozenset({b"tools", b"system", b"instructions"})


def rewrite(rule: NormalizeRule, piece: Piece) -> Piece:
    """Return the piece after the rule; the same where it reports nothing of it."""
    change = _RULES[rule].get(piece.name)
    return piece if change is None else Piece(piece.name, change(piece.value))


def _without_header(system: bytes) -> bytes:
    if line := _header_line(system):
        return b'"' + system[line.end() :]
    return _kept_items(system, lambda block: None if _is_header_block(block) else block)


def _without_header_in_message(message: bytes) -> bytes:
    found = _header_in_message(message)
    if found is None:
        return message
    return found[1] + (b'"' if found["text"] else b"[") + message[found.end() :]


def _without_counters(text: bytes) -> bytes:
    return _counters(b"", text) if _COUNTER in text else text


def _without_counter_blocks(system: bytes) -> bytes:
    if _COUNTER not in system:
        return system

    def kept(block: bytes) -> bytes | None:
        rest = _without_counters(block)
        return None if rest != block and _is_empty_block(rest) else rest

    return _kept_items(system, kept) if system.startswith(b"[") else _without_counters(system)


def _kept_items(value: bytes, keep: Callable[[bytes], bytes | None]) -> bytes:
    """Return the array with what `keep` makes of its items; as it was where that is all of it, or nothing."""
    items = _items(value)
    kept = [item for item in map(keep, items) if item is not None]
    return value if not kept or kept == items else b"[" + b",".join(kept) + b"]"


def _sorted_tools(tools: bytes) -> bytes:
    items = _items(tools)
    try:
        named = [(_name(item), item) for item in items]
    except _UNREADABLE:
        return tools
    ordered = [item for _, item in sorted(named, key=lambda pair: pair[0])]
    return tools if ordered == items else b"[" + b",".join(ordered) + b"]"


def _name(tool: bytes) -> tuple[str, str]:
    read = _decode_tool(tool)
    return (read.function.name or read.name, read.type)


def _items(value: bytes) -> list[bytes]:
    """Of an array; none of anything else, and of one with too many."""
    if not value.startswith(b"["):
        return []
    try:
        items = _decode_items(value)
    except _UNREADABLE:
        return []
    return [] if len(items) > _MAX_ITEMS else [bytes(item) for item in items]


_RULES: Mapping[NormalizeRule, Mapping[bytes, Callable[[bytes], bytes]]] = {
    NormalizeRule.BILLING_HEADER: {b"system": _without_header, b"messages": _without_header_in_message},
    NormalizeRule.SORT_TOOLS: {b"tools": _sorted_tools},
    NormalizeRule.TOKEN_COUNTERS: {
        b"system": _without_counter_blocks,
        b"instructions": _without_counters,
        b"messages": _without_counters,
    },
}


def put_into(body: bytes, before: Piece, after: Piece) -> bytes | None:
    """Return the body with the one piece in place of the other, every other byte as it was; None where it is not found
    as clients commonly write it."""
    name = b'"%b":' % before.name
    at = -1
    for _ in range(_MAX_PLACES):
        if (at := body.find(name, at + 1)) < 0:
            return None
        start = at + len(name) + body.startswith(b" ", at + len(name))
        if before.name == b"messages" and body.startswith(b"[", start):
            start += 1
        if body.startswith(before.value, start):  # to search for all of a long value takes milliseconds
            return body[:start] + after.value + body[start + len(before.value) :]
    return None


def replaced_prompt(prompt: Prompt, changes: Sequence[tuple[Piece, Piece]]) -> Prompt:
    """Return the prompt that the body with these changes has."""
    changed = {before.name: after.value for before, after in changes}
    fields = []
    for field in fields_of(prompt.shape):
        name = field.partition(b":")[0]
        fields.append(name + b":" + changed[name] if name in changed and name in _FIELDS else field)
    parts = prompt.parts
    if b"messages" in changed:
        parts = (changed[b"messages"], *parts[1:])
    return Prompt(b"".join([field + b"\0" for field in fields]), parts, prompt.unread_bytes)


class ResolvesRoutes(Protocol):
    """The routes, as far as the filter needs them."""

    def resolve(self, path: str, model: str) -> RouteTarget | None: ...


class NormalizeFilter(Step):
    """Rewrites the prompts that rules change. Between `inference_request` and `kvcache`: what follows sees the request
    as the engine will."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Sequence[NormalizeRule],
        *,
        routes: ResolvesRoutes,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._rules = rules
        self._routes = routes

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Forward the request, rewritten or not; a body too long to be decoded at once is left alone."""
        request = exchange.inference
        body = exchange.body
        if request is None or body is None or exchange.members is not None:
            return
        pieces = pieces_of(request.prompt)
        changed, names = self._rewritten(pieces)
        target = self._routes.resolve(downstream.scope["path"], request.model) if names else None
        if target is None:
            return
        changes = [(old, new) for old, new in zip(pieces, changed, strict=True) if old != new]
        result = "rewritten" if put_all(exchange, downstream, request, changes) else "failed"
        self.metrics.group(NormalizeMetrics).normalized.labels(target.cluster.name, names, result).inc()

    def _rewritten(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], str]:
        """Return the pieces after all rules, and the names of those that changed something."""
        names = []
        for rule in self._rules:
            after = [rewrite(rule, piece) for piece in pieces]
            if after != pieces:
                pieces = after
                names.append(rule.value)
        return pieces, "+".join(names)


def put_all(
    exchange: Exchange, downstream: Downstream, request: InferenceRequest, changes: Sequence[tuple[Piece, Piece]]
) -> bool:
    """Put the changed pieces into the body and the request. False, and nothing changed, where that cannot be done
    without a doubt: what is parsed of the new body must be the old request with these changes."""
    body = exchange.body
    for before, after in changes:
        body = None if body is None else put_into(body, before, after)
    if body is None:
        return False
    wanted = replaced_prompt(request.prompt, changes)
    parsed = decode_body(request.kind, body, NO_CALLER)
    if parsed is None or parsed.prompt != wanted:
        return False
    exchange.body = downstream.replayed = body
    exchange.inference = msgspec.structs.replace(request, prompt=wanted)
    scope = downstream.scope
    length = b"%d" % len(body)
    scope["headers"] = [(name, length if name == b"content-length" else value) for name, value in scope["headers"]]
    return True


def build(app: ASGIApp, settings: NormalizeSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`; `app` itself without rules."""
    if not settings.rules:
        return app
    return NormalizeFilter(
        app,
        settings.rules,
        routes=context.services.routes,
        metrics=context.metrics,
        clock=context.clock,
    )
