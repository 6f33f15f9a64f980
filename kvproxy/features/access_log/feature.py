"""The feature, as the core meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.model import Fraction, Model
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import FilterOrder, FilterPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.proxy.filters.chain import FilterContext


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    retired = {"format": "its lines have the format of the process log (log.format)"}

    sample: Fraction = 1.0
    """Share of the requests logged; those that failed (5xx, or broken off) always are."""


class AccessLog(Feature):
    """Writes one line per request."""

    name = "access_log"
    filters = {"access_log": AccessLogSettings}
    filter_places = (FilterPlace("access_log", "inference_request", default=True),)
    filter_order = (FilterOrder("request_id", "access_log", "the access log runs before the request id is set"),)

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter, with its lines among the context's lifetimes."""
        from kvproxy.features.access_log.access_log import build

        return build(inner, settings, context)


FEATURE = AccessLog()
