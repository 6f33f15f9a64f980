"""Settings of normalized prompts."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from kvproxy.base.settings.feature_settings import AddedFilter, FeatureSettings, FilterOrder
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.operate.config.schema import Config


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


def verify(config: Config) -> Iterator[Finding]:
    """Yield a chain that parses nothing leaves nothing to rewrite."""
    names = [spec.name for spec in config.filters]
    if "normalize" in names and "inference_request" not in names:
        yield error_at(("filters", names.index("normalize")), "needs inference_request before it")


SETTINGS = FeatureSettings(
    filters={"normalize": AddedFilter(NormalizeSettings, "kvcache")},
    filter_order=(
        FilterOrder(
            "inference_request", "normalize", "normalize rewrites prompts that inference_request parses", "error"
        ),
        FilterOrder("normalize", "kvcache", "kvcache predicts for prompts that normalize then rewrites"),
    ),
    verify=verify,
)
