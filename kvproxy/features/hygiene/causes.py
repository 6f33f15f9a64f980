"""Why returning prompts could not be reused: the causes, how their texts look and what helps."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum


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
