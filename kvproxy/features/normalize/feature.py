"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import FilterOrder, FilterPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.operate.config.schema import Config
    from kvproxy.proxy.filters.chain import FilterContext


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


class Normalize(Feature):
    """Rewrites prompts so that engines can reuse them."""

    name = "normalize"
    metric_group = "NormalizeMetrics"
    filters = {"normalize": NormalizeSettings}
    filter_places = (FilterPlace("normalize", "kvcache"),)
    filter_order = (
        FilterOrder(
            "inference_request", "normalize", "normalize rewrites prompts that inference_request parses", "error"
        ),
        FilterOrder("normalize", "kvcache", "kvcache predicts for prompts that normalize then rewrites"),
    )

    def verify(self, config: Config) -> Iterator[Finding]:
        """Yield a chain that parses nothing leaves nothing to rewrite."""
        names = [spec.name for spec in config.filters]
        if "normalize" in names and "inference_request" not in names:
            yield error_at(("filters", names.index("normalize")), "needs inference_request before it")

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter."""
        from kvproxy.features.normalize.normalize import build

        return build(inner, settings, context)


FEATURE = Normalize()
