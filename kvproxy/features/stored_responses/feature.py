"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvproxy.base.settings.model import Model, Size
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.operate.feature import Feature
from kvproxy.proxy.feature import FilterOrder, FilterPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.operate.config.schema import Config
    from kvproxy.proxy.filters.chain import FilterContext


class StoredResponsesSettings(Model):
    """Answers of `/v1/responses`, kept by the proxy so that any engine may go on from them. Prompts and answers lie in
    the folder as text."""

    path: str = Field(min_length=1)
    """Folder for them, which the proxy may write to; workers and replicas that share it go on from each other's."""
    max_bytes: Size = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Of all answers together; the longest unused go first. Each is kept for a day after its last use."""


class StoredResponses(Feature):
    """Keeps answers, so that any engine may go on from them."""

    name = "stored_responses"
    metric_group = "StoredResponsesMetrics"
    filters = {"stored_responses": StoredResponsesSettings}
    filter_places = (FilterPlace("stored_responses", "kvcache"),)
    filter_order = (
        FilterOrder(
            "inference_request", "stored_responses", "stored_responses rewrites what inference_request reads", "error"
        ),
        FilterOrder("stored_responses", "kvcache", "kvcache predicts for prompts that lack their history"),
    )

    def verify(self, config: Config) -> Iterator[Finding]:
        """Refuse a chain that reads no requests."""
        names = [spec.name for spec in config.filters]
        if self.name in names and "inference_request" not in names:
            yield error_at(("filters", names.index(self.name)), "needs inference_request before it")

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter."""
        from kvproxy.features.stored_responses.filter import build

        return build(inner, settings, context)


FEATURE = StoredResponses()
