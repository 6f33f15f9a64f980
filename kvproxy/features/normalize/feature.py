"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.features.normalize.settings import NormalizeSettings
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import FilterOrder, FilterPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.operate.config.schema import Config
    from kvproxy.proxy.filters.chain import FilterContext


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
