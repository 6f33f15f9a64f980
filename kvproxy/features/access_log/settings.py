"""Settings of the access log."""

from __future__ import annotations

from kvproxy.base.settings.feature_settings import AddedFilter, FeatureSettings, FilterOrder
from kvproxy.base.settings.model import Fraction, Model


class AccessLogSettings(Model):
    """Settings of `access_log`."""

    retired = {"format": "its lines have the format of the process log (log.format)"}

    sample: Fraction = 1.0
    """Share of the requests logged; those that failed (5xx, or broken off) always are."""


SETTINGS = FeatureSettings(
    filters={"access_log": AddedFilter(AccessLogSettings, "inference_request", default=True)},
    filter_order=(FilterOrder("request_id", "access_log", "the access log runs before the request id is set"),),
)
