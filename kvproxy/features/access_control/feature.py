"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvproxy.features.access_control.settings import AuthSettings, CorsSettings, RateLimitSettings
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import FilterOrder, FilterPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.base.settings.paths import Finding
    from kvproxy.operate.config.schema import Config
    from kvproxy.proxy.filters.chain import FilterContext


class AccessControl(Feature):
    """Decides which clients may call, from which pages, and how much."""

    name = "access_control"
    metric_group = "AccessMetrics"
    filters = {"auth": AuthSettings, "cors": CorsSettings, "rate_limit": RateLimitSettings}
    filter_places = tuple(FilterPlace(name, "inference_request") for name in ("cors", "auth", "rate_limit"))
    filter_order = (
        FilterOrder(
            "auth", "rate_limit", "rate_limit counts by client address, since auth names the tenant only later"
        ),
        FilterOrder("auth", "kvcache", "kvcache works for requests that auth then refuses"),
        FilterOrder("cors", "auth", "auth refuses browsers' preflight requests before cors can answer them"),
    )

    def verify(self, config: Config) -> Iterator[Finding]:
        """Yield settings with which a filter would admit no client, or any page."""
        if any(spec.name in self.filters for spec in config.filters):
            from kvproxy.features.access_control.verify import find_faults

            yield from find_faults(config)

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter around `inner`."""
        from kvproxy.features.access_control import auth, cors, rate_limit

        if name == "cors":
            return cors.build(inner, settings, context)
        return auth.build(inner, settings, context) if name == "auth" else rate_limit.build(inner, settings, context)


FEATURE = AccessControl()
