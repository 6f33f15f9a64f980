"""Settings of normalize."""

from __future__ import annotations

from enum import StrEnum

from kvproxy.base.settings.model import Model


class NormalizeRule(StrEnum):
    """Changes that `normalize` may make to a prompt."""

    BILLING_HEADER = "billing_header"
    """Takes out the header that Claude Code puts in front of its system prompt, another one in every request."""
    SORT_TOOLS = "sort_tools"
    """Sorts tools by name."""
    TOKEN_COUNTERS = "token_counters"
    """Takes `<total_tokens>N tokens left</total_tokens>` out of system prompts."""


class NormalizeSettings(Model):
    """Settings of `normalize`."""

    retired = {"share": "all sessions are rewritten, without a trial"}

    rules: tuple[NormalizeRule, ...] = ()
    """`billing_header`, `sort_tools`, `token_counters`; none: the filter does nothing."""
