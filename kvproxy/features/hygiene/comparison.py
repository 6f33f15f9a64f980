"""Changes between a session's last prompt and its next one: the first changed part, the cause, and the tokens sent
again behind it. Pure; the new prompt's text is read, but not kept.

| cause | evidence |
|---|---|
| `volatile_header` | the first difference of a system block, or a later one, is a line with a header (`x-...:`) |
| `token_counter` | or a line that counts the remaining tokens |
| `date_or_id` | there, or in a message, of nearly the same size, is a date, a time or an id; or in a changed tool |
| `tool_order` | the same tools in another order |
| `tools`, `system`, `template` | tools; a system block; another field that shapes the template: changed otherwise |
| `compaction` | messages were dropped or cut short, and the later ones were sent again |
| `message` | a message was rewritten in its place |
| `model_switch` | the whole prompt, and more, was sent to another model |

A change is a break only of the same conversation: its last message comes again. Other prompts of a session (sub-agents,
side requests, branches) begin threads of their own; their common prefix is no loss."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec

from kvproxy.cache.indexes.radix import common_blocks
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.prefix.session_hashes import PromptText
from kvproxy.features.hygiene.parts import HeadText, Line, PartKind, head_texts, items_of, lines_behind
from kvproxy.features.hygiene.threads import LENGTH, Session, Thread


class Cause(StrEnum):
    """A metric label."""

    VOLATILE_HEADER = "volatile_header"
    TOKEN_COUNTER = "token_counter"
    DATE_OR_ID = "date_or_id"
    TOOL_ORDER = "tool_order"
    TOOLS = "tools"
    SYSTEM = "system"
    TEMPLATE = "template"
    COMPACTION = "compaction"
    MESSAGE = "message"
    MODEL_SWITCH = "model_switch"
    MOVED = "moved"
    EVICTED = "evicted"


#: Description and remedy by cause.
ADVICE: dict[str, tuple[str, str]] = {
    Cause.VOLATILE_HEADER: (
        "the system prompt has a header in it that is another one in every request, and the engine does not drop it",
        "Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0 in its environment; or `normalize` with `billing_header`",
    ),
    Cause.TOKEN_COUNTER: (
        "the client writes into its prompt how many tokens are left",
        "switch that off in the client, or `normalize` with `token_counters`",
    ),
    Cause.DATE_OR_ID: (
        "a date, a time or an id in front of the conversation changes",
        "have the client put changing text into its last message",
    ),
    Cause.TOOL_ORDER: (
        "the same tools come in another order",
        "have the client keep one order, or `normalize` with `sort_tools`",
    ),
    Cause.TOOLS: (
        "tools are added, left out or described differently within a session",
        "have the client send all of its tools from the first turn on",
    ),
    Cause.SYSTEM: (
        "the system prompt is rewritten within a session",
        "have the client keep it, and put news into its last message",
    ),
    Cause.TEMPLATE: (
        "inputs of the chat template (reasoning effort, thinking, its arguments) change within a session",
        "keep it as it is for a whole session",
    ),
    Cause.COMPACTION: (
        "the client shortens its history",
        "expected when a context is full; if it happens often, raise the client's threshold or let it cut more at once",
    ),
    Cause.MESSAGE: (
        "the client rewrites messages that it sent before",
        "have it only add messages",
    ),
    Cause.MODEL_SWITCH: (
        "the conversation goes on with another model",
        "none but to stay with one: no cache is shared between models",
    ),
    Cause.MOVED: (
        "the next turn was served by another endpoint, which did not hold the prompt",
        "`kvproxy explain REQUEST_ID` shows why; more room for load, or a `queue`, keeps more turns at home",
    ),
    Cause.EVICTED: (
        "the engine no longer had the KV of the turn before",
        "more KV memory, or a tier below it (LMCache); `kvproxy doctor --advise` has the figures",
    ),
}


#: Of a changed text, what is looked at.
_LOOKED_AT_BYTES = 64 * 1024

_is_header = re.compile(rb'(?:^|")\s*x-[a-z][a-z0-9-]{2,60}:', re.IGNORECASE).search
_is_counter = re.compile(
    rb"total_tokens|\d tokens? (?:left|remaining|used)|tokens?[ _](?:left|remaining|used|budget)\W{1,3}\d|"
    rb"context (?:left|remaining|used)\W{1,3}\d",
    re.IGNORECASE,
).search
_is_date_or_id = re.compile(
    rb"\d{4}-\d\d-\d\d|\d\d?:\d\d|\d\d?[./]\d\d?[./]\d{2,4}|\b[0-9a-f]{8}-[0-9a-f]{4}-|"
    rb"\b(?=[a-z]{0,15}\d)[0-9a-f]{8,64}\b|\b\d{6,20}\b|"
    rb"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6} \d|"
    rb"\b(?=[a-z_-]{0,32}\d)[a-z]{2,12}_[a-z0-9]{8,64}\b",
    re.IGNORECASE,
).search
#: Clients' wording of a summary in place of earlier messages.
is_summary = re.compile(
    rb"continued from a previous conversation|summary of (?:the|our|this) (?:previous |earlier |prior )?"
    rb"(?:conversation|session)|conversation (?:so far )?(?:was|has been) (?:compacted|summarized)|"
    rb"produced a summary of|<(?:conversation_)?summary>",
    re.IGNORECASE,
).search


def common_volatile_cause(texts: Sequence[bytes]) -> Cause | None:
    """Return what the first of these texts has in it, if all of them hold something that changes by itself."""
    causes = [volatile_cause(text[:_LOOKED_AT_BYTES]) for text in texts if text.strip()]
    return causes[0] if causes and None not in causes else None


_LOOKS: Sequence[tuple[Cause, Callable[[bytes], object]]] = (
    (Cause.VOLATILE_HEADER, _is_header),
    (Cause.TOKEN_COUNTER, _is_counter),
    (Cause.DATE_OR_ID, _is_date_or_id),
)


def volatile_cause(text: bytes) -> Cause | None:
    """Return the cause of a text that changes by itself, by the strictest check first."""
    return next((cause for cause, looks in _LOOKS if looks(text)), None)


#: Size difference of a part whose value was rewritten, at most.
_NEAR_BYTES = 64
#: Least number of messages that a summary replaces.
_LONG_HISTORY = 4
_SUMMARY_WITHIN_BYTES = 4096
#: Less that came again behind a change of messages is no sign of the same conversation.
_LEAST_AGAIN_BYTES = 256


class Change(msgspec.Struct, frozen=True):
    """The first part that changed, counted from 1 among its kind, and the bytes behind it that were sent before."""

    cause: Cause
    part: str
    again_bytes: float
    thread: Thread  # the conversation it broke


def find_change(session: Session, new: Thread, text: PromptText) -> Change | None:
    """Return what broke one of the session's threads, none of which `new` goes on; None where it is a conversation of
    its own.

    Of several threads the one counts that shares most with it.
    """
    best = None
    best_shared = (-1, -1.0)
    for thread in reversed(session.threads):
        change = _compare(thread, new, text, forgot=session.forgot)
        shared = (_same_bytes(thread, new), 0.0 if change is None else change.again_bytes)
        if shared > best_shared:
            best = change
            best_shared = shared
    return best


def _same_bytes(old: Thread, new: Thread) -> int:
    """Of the messages at the beginning."""
    if old.head != new.head or old.model != new.model:
        return 0
    return _size(new.messages[: _first_difference(old.messages, new.messages)])


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            return index
    return min(len(old), len(new))


def _compare(old: Thread, new: Thread, text: PromptText, *, forgot: bool) -> Change | None:
    goes_on = len(old.messages) > 0 and old.messages[-1] in new.messages
    if old.model != new.model:
        further = goes_on and len(new.messages) > len(old.messages)
        return Change(Cause.MODEL_SWITCH, "model", _common_bytes(old, new), old) if further else None
    if old.head != new.head:
        further = goes_on and len(new.messages) > len(old.messages)
        return _changed_head(old, new, text) if further else None
    at = _first_difference(old.messages, new.messages)
    if at in (len(old.messages), len(new.messages)):
        return None  # another salt; or taken back to an earlier message
    if goes_on:
        return _changed_messages(old, new, text, at)
    if _is_summarized(old, new, text, at):
        return Change(Cause.COMPACTION, _message(new, at), _size(new.messages[at:]), old)
    if at == len(old.messages) - 1 and len(new.messages) > len(old.messages) and not forgot:
        # The conversation went on from its last message, which is another one now. A branch would have been seen with
        # that message as its last.
        return _rewritten(
            old, new, text, [at], again_bytes=min(_size(old.messages[at : at + 1]), _size(new.messages[at : at + 1]))
        )
    return None


def _common_bytes(old: Thread, new: Thread) -> int:
    head = sum(field.size for field in new.head.fields if field in old.head.fields)
    return head + _resent_bytes(old, new)


def _size(messages: Iterable[int]) -> int:
    """Bytes of messages."""
    return sum(message & LENGTH for message in messages)


def _resent_bytes(old: Thread, new: Thread) -> int:
    known = set(old.messages)
    return _size(message for message in new.messages if message in known)


# messages


def _changed_messages(old: Thread, new: Thread, text: PromptText, at: int) -> Change | None:
    """Return the change if the messages from `at` on are others, up to some that came again."""
    last = len(new.messages) - 1 - new.messages[::-1].index(old.messages[-1])
    gone = Counter(old.messages[at:])
    fresh: list[int] = []
    resent = 0
    for index in range(at, last + 1):
        if gone[new.messages[index]] > 0:
            gone[new.messages[index]] -= 1
            resent += new.messages[index] & LENGTH
        else:
            fresh.append(index)
    if resent < _LEAST_AGAIN_BYTES:
        return None  # a few words that are in many conversations
    lost = _size(message for message in old.messages[at:] if gone[message] > 0)
    put = _size(new.messages[index] for index in fresh)
    if lost > _NEAR_BYTES + 2 * put:
        return Change(Cause.COMPACTION, _message(new, at), resent + put, old)
    return _rewritten(old, new, text, fresh or [at], again_bytes=resent)


def _rewritten(old: Thread, new: Thread, text: PromptText, fresh: Sequence[int], *, again_bytes: float) -> Change:
    pairs = [(old.messages[index : index + 1], new.messages[index : index + 1]) for index in fresh]
    near = all(before and _is_near(_size(before), _size(after)) for before, after in pairs)
    cause = common_volatile_cause([text.part_at(new.head.leading + index) for index in fresh]) if near else None
    return Change(cause or Cause.MESSAGE, _message(new, fresh[0]), again_bytes, old)


def _is_near(size: int, other: int) -> bool:
    return abs(size - other) <= _NEAR_BYTES


def _is_summarized(old: Thread, new: Thread, text: PromptText, at: int) -> bool:
    """Return True if earlier messages were replaced by a summary, by its wording."""
    if len(new.messages) >= len(old.messages) or len(old.messages) - at < _LONG_HISTORY:
        return False
    return is_summary(text.part_at(new.head.leading + at), 0, _SUMMARY_WITHIN_BYTES) is not None


def _message(thread: Thread, index: int) -> str:
    return f"message {thread.head.leading + index + 1}"


# the head


def _changed_head(old: Thread, new: Thread, text: PromptText) -> Change | None:
    """Tools, the system prompt or the template are others, and the conversation goes on."""
    texts, _ = head_texts(text)
    again = _resent_bytes(old, new)
    for kind in PartKind:
        before = old.head.of_kind(kind)
        after = new.head.of_kind(kind)
        changed = next((index for index, field in enumerate(after) if field not in before), None)
        if changed is None and len(before) == len(after):
            continue
        if kind is PartKind.TEMPLATE:
            return Change(Cause.TEMPLATE, "template", again, old)
        again += sum(field.size for field in new.head.of_kind(PartKind.TOOL)) if kind is PartKind.SYSTEM else 0
        if changed is None or changed >= len(before):
            return Change(_OTHERWISE[kind], f"{kind} 1", again, old)  # it came, or went, as a whole
        own = [each for each in texts if each.kind is kind][changed]
        if kind is PartKind.TOOL:
            return _changed_tools(old, before[changed].tools, after[changed].tools, own, again)
        return _changed_system(old, new, own, abs(len(own.text) - before[changed].size), again)
    return None  # the same in another order of fields


_OTHERWISE = {PartKind.TOOL: Cause.TOOLS, PartKind.SYSTEM: Cause.SYSTEM}


def _changed_tools(
    broken: Thread, old: Sequence[int], new: Sequence[int], field: HeadText, again_bytes: float
) -> Change:
    at = _first_difference(old, new)
    part = f"{PartKind.TOOL} {at + 1}"
    if Counter(old) == Counter(new):
        return Change(Cause.TOOL_ORDER, part, again_bytes, broken)
    cause = None
    if len(old) == len(new):
        texts = items_of(bytes(field.text))
        changed = [text for text, before, after in zip(texts, old, new, strict=True) if before != after]
        cause = common_volatile_cause(changed)
    return Change(cause or Cause.TOOLS, part, again_bytes, broken)


def _changed_system(broken: Thread, new: Thread, field: HeadText, difference: int, again_bytes: float) -> Change:
    """By the lines in which the first difference may be."""
    at = max(0, TEXT_BLOCK_BYTES * _common_blocks(broken.blocks, new.blocks) - field.start)
    near, after = lines_behind(bytes(field.text), at)
    again = again_bytes + len(field.text) - at
    for line in near:
        cause = volatile_cause(line.text)
        if cause is not None and (cause is not Cause.DATE_OR_ID or difference <= _NEAR_BYTES):
            return Change(cause, f"{PartKind.SYSTEM} {line.block}, line {line.number}", again, broken)
    for line in after:  # such a line changes every time, so the first one explains an earlier difference
        if (cause := volatile_cause(line.text)) in (Cause.VOLATILE_HEADER, Cause.TOKEN_COUNTER):
            return Change(cause, f"{PartKind.SYSTEM} {line.block}, line {line.number}", again, broken)
    return Change(Cause.SYSTEM, _place(near), again, broken)


def _place(near: Sequence[Line]) -> str:
    """Return the block, and its lines one of which is the first that changed."""
    if not near:
        return f"{PartKind.SYSTEM} 1"
    block = near[0].block
    last = max(line.number for line in near if line.block == block)
    lines = f"lines {near[0].number}-{last}" if last > near[0].number else f"line {last}"
    return f"{PartKind.SYSTEM} {block}, {lines}"


def _common_blocks(old: array[int], new: array[int]) -> int:
    return common_blocks(old, 0, new, 0) if old and new and old[0] == new[0] else 0
