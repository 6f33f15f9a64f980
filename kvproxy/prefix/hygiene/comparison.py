"""What changed between a session's last prompt and the one it returned with: the first part, why, and how much was sent
again behind it. Pure; the new prompt's text is looked at, and nothing of it is kept.

| cause | what is seen |
|---|---|
| `volatile_header` | the changed lines of a system block are headers (`x-...:`) |
| `token_counter` | they count the tokens that are left |
| `date_or_id` | they hold a date, a time or an id; of a tool or message: its size stayed nearly the same, too |
| `tool_order` | the same tools in another order |
| `tools`, `system`, `template` | tools; a system block; another field that shapes the template: changed otherwise |
| `compaction` | messages were dropped or cut short, and what came after them was sent again |
| `message` | a message was rewritten in its place |
| `model_switch` | the whole prompt, and more, was sent to another model |

A change is a break only of the same conversation: its last message comes again. Other prompts of a session (sub-agents,
side requests, branches) begin threads of their own; what they share with others is no loss.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvproxy.prefix.hygiene.causes import Cause
from kvproxy.prefix.hygiene.parts import HeadPart, PartKind, head_texts, lines_of
from kvproxy.prefix.hygiene.threads import Session, Thread
from kvproxy.prefix.tokens.session_hashes import PromptText

#: A value that was written again changed the size of its part by no more.
_NEAR_BYTES = 64
#: Of a changed text, what is looked at.
_LOOKED_AT_BYTES = 64 * 1024
#: A summary takes the place of a history of at least so many messages.
_LONG_HISTORY = 4
_SUMMARY_WITHIN_BYTES = 4096
#: Less that came again behind a change of messages is no sign of the same conversation.
_LEAST_AGAIN_BYTES = 256

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
#: How clients say that a summary stands for what was said before.
_is_summary = re.compile(
    rb"continued from a previous conversation|summary of (?:the|our|this) (?:previous |earlier |prior )?"
    rb"(?:conversation|session)|conversation (?:so far )?(?:was|has been) (?:compacted|summarized)|"
    rb"produced a summary of|<(?:conversation_)?summary>",
    re.IGNORECASE,
).search


class Change(msgspec.Struct, frozen=True):
    """The first part that changed, counted from 1 among its kind, and the bytes behind it that were sent before."""

    cause: Cause
    part: str
    again_bytes: float
    thread: Thread  # the conversation it broke


def find_change(session: Session, new: Thread, text: PromptText) -> Change | None:
    """What broke one of the session's threads, none of which `new` goes on; None where it is a conversation of its own.

    Of several threads the one counts that shares most with it.
    """
    best, best_shared = None, (-1, -1.0)
    for thread in reversed(session.threads):
        change = _compare(thread, new, text, forgot=session.forgot)
        shared = (_same_bytes(thread, new), 0.0 if change is None else change.again_bytes)
        if shared > best_shared:
            best, best_shared = change, shared
    return best


def _same_bytes(old: Thread, new: Thread) -> int:
    """Of the messages at the beginning."""
    if old.head != new.head or old.model != new.model:
        return 0
    return sum(new.sizes[: _first_difference(old.digests, new.digests)])


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            return index
    return min(len(old), len(new))


def _compare(old: Thread, new: Thread, text: PromptText, *, forgot: bool) -> Change | None:
    goes_on = len(old.digests) > 0 and old.digests[-1] in new.digests
    if old.model != new.model:
        further = goes_on and len(new.digests) > len(old.digests)
        return Change(Cause.MODEL_SWITCH, "model", _common_bytes(old, new), old) if further else None
    if old.head != new.head:
        return _changed_head(old, new, text) if goes_on else None
    at = _first_difference(old.digests, new.digests)
    if at in (len(old.digests), len(new.digests)):
        return None  # another salt; or taken back to an earlier message
    if goes_on:
        return _changed_messages(old, new, text, at)
    if _is_summarized(old, new, text, at):
        return Change(Cause.COMPACTION, _message(new, at), sum(new.sizes[at:]), old)
    if at == len(old.digests) - 1 and len(new.digests) > len(old.digests) and not forgot:
        # The conversation went on from its last message, which is another one now. A branch would have been seen with
        # that message as its last.
        return _rewritten(old, new, text, [at], again_bytes=min(old.sizes[at], new.sizes[at]))
    return None


def _common_bytes(old: Thread, new: Thread) -> int:
    known = {part.digest for part in old.head.all_parts()}
    head = sum(part.size for part in new.head.all_parts() if part.digest in known)
    return head + _resent_bytes(old, new)


def _resent_bytes(old: Thread, new: Thread) -> int:
    known = set(old.digests)
    return sum(size for size, digest in zip(new.sizes, new.digests, strict=True) if digest in known)


# messages


def _changed_messages(old: Thread, new: Thread, text: PromptText, at: int) -> Change | None:
    """The messages from `at` on are others, up to some that came again."""
    last = len(new.digests) - 1 - new.digests[::-1].index(old.digests[-1])
    gone = Counter(old.digests[at:])
    fresh: list[int] = []
    resent = 0
    for index in range(at, last + 1):
        if gone[new.digests[index]] > 0:
            gone[new.digests[index]] -= 1
            resent += new.sizes[index]
        else:
            fresh.append(index)
    if resent < _LEAST_AGAIN_BYTES:
        return None  # a few words that are in many conversations
    lost = sum(size for size, digest in zip(old.sizes[at:], old.digests[at:], strict=True) if gone[digest] > 0)
    put = sum(new.sizes[index] for index in fresh)
    if lost > _NEAR_BYTES + 2 * put:
        return Change(Cause.COMPACTION, _message(new, at), resent + put, old)
    return _rewritten(old, new, text, fresh or [at], again_bytes=resent)


def _rewritten(old: Thread, new: Thread, text: PromptText, fresh: Sequence[int], *, again_bytes: float) -> Change:
    near = all(index < len(old.sizes) and _is_near(new.sizes[index], old.sizes[index]) for index in fresh)
    cause = _volatile([text.part_at(new.head.leading + index) for index in fresh]) if near else None
    return Change(cause or Cause.MESSAGE, _message(new, fresh[0]), again_bytes, old)


def _is_near(size: int, other: int) -> bool:
    return abs(size - other) <= _NEAR_BYTES


def _is_summarized(old: Thread, new: Thread, text: PromptText, at: int) -> bool:
    """Whether what was said before was replaced by a summary of it, by its words."""
    if len(new.digests) >= len(old.digests) or len(old.digests) - at < _LONG_HISTORY:
        return False
    return _is_summary(text.part_at(new.head.leading + at), 0, _SUMMARY_WITHIN_BYTES) is not None


def _message(thread: Thread, index: int) -> str:
    return f"message {thread.head.leading + index + 1}"


# the head


def _changed_head(old: Thread, new: Thread, text: PromptText) -> Change | None:
    """Tools, system blocks or the template are others, and the conversation goes on."""
    before, after = old.head.all_parts(), new.head.all_parts()
    first = next((kind for kind in PartKind if _digests(before, kind) != _digests(after, kind)), None)
    if first is None:
        return None  # the same in another order of fields
    ours, theirs = ([part for part in parts if part.kind is first] for parts in (before, after))
    at = _first_difference(_digests(ours, first), _digests(theirs, first))
    known = {part.digest for part in before}
    kinds = list(PartKind)
    behind = theirs[at:] + [part for part in after if kinds.index(part.kind) > kinds.index(first)]
    again = _resent_bytes(old, new) + sum(part.size for part in behind if part.digest in known)
    texts = [each for kind, each in head_texts(text, new.head) if kind is first]
    if first is PartKind.SYSTEM:
        return _changed_system(old, Parts(ours, theirs, texts), at, again)
    if first is PartKind.TOOL:
        return Change(_tools_cause(Parts(ours, theirs, texts)), f"{first} {at + 1}", again, old)
    return Change(Cause.TEMPLATE, "template", again, old)


class Parts(NamedTuple):
    """Those of one kind, as they were and as they are, and their texts now."""

    old: Sequence[HeadPart]
    new: Sequence[HeadPart]
    texts: Sequence[bytes]


def _digests(parts: Sequence[HeadPart], kind: PartKind) -> list[int]:
    return [part.digest for part in parts if part.kind is kind]


def _tools_cause(tools: Parts) -> Cause:
    if Counter(each.digest for each in tools.old) == Counter(each.digest for each in tools.new):
        return Cause.TOOL_ORDER
    if len(tools.old) == len(tools.new):
        pairs = zip(tools.old, tools.new, tools.texts, strict=True)
        changed = [(before, after, text) for before, after, text in pairs if before.digest != after.digest]
        if all(_is_near(before.size, after.size) for before, after, _ in changed):
            return _volatile([text for _, _, text in changed]) or Cause.TOOLS
    return Cause.TOOLS


def _changed_system(broken: Thread, blocks: Parts, at: int, again_bytes: float) -> Change:
    """By the lines that were not there before."""
    kept = {part.digest for part in blocks.old} & {part.digest for part in blocks.new}
    known = Counter(line for part in blocks.old if part.digest not in kept for line in part.lines)
    where, changed = "", []
    for number, (part, text) in enumerate(zip(blocks.new, blocks.texts, strict=True), 1):
        if part.digest in kept:
            continue
        for place, (line, digest) in enumerate(zip(lines_of(text), part.lines, strict=True), 1):
            if known[digest] > 0:
                known[digest] -= 1
                again_bytes += len(line) if where else 0
            else:
                changed.append(line)
                where = where or f"{PartKind.SYSTEM} {number}, line {place}"
    return Change(_volatile(changed) or Cause.SYSTEM, where or f"{PartKind.SYSTEM} {at + 1}", again_bytes, broken)


# texts


def _volatile(texts: Sequence[bytes]) -> Cause | None:
    """What the first of these texts has in it, if all of them hold something that changes by itself."""
    causes = [_volatile_cause(text[:_LOOKED_AT_BYTES]) for text in texts if text.strip()]
    return causes[0] if causes and None not in causes else None


_LOOKS: Sequence[tuple[Cause, Callable[[bytes], object]]] = (
    (Cause.VOLATILE_HEADER, _is_header),
    (Cause.TOKEN_COUNTER, _is_counter),
    (Cause.DATE_OR_ID, _is_date_or_id),
)


def _volatile_cause(text: bytes) -> Cause | None:
    return next((cause for cause, looks in _LOOKS if looks(text)), None)
