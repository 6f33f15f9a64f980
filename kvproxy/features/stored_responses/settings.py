"""Settings of stored responses."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvproxy.base.settings.feature_settings import AddedFilter, FeatureSettings, FilterOrder
from kvproxy.base.settings.model import Model, Size
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.operate.config.schema import Config


class StoredResponsesSettings(Model):
    """Answers of `/v1/responses`, kept by the proxy so that any engine may go on from them. Prompts and answers lie in
    the folder as text."""

    path: str = Field(min_length=1)
    """Folder for them, which the proxy may write to; workers and replicas that share it go on from each other's."""
    max_bytes: Size = Field(default=1024 * 1024 * 1024, ge=1024 * 1024)
    """Of all answers together; the longest unused go first. Each is kept for a day after its last use."""


def verify(config: Config) -> Iterator[Finding]:
    """Refuse a chain that reads no requests."""
    names = [spec.name for spec in config.filters]
    if "stored_responses" in names and "inference_request" not in names:
        yield error_at(("filters", names.index("stored_responses")), "needs inference_request before it")


SETTINGS = FeatureSettings(
    filters={"stored_responses": AddedFilter(StoredResponsesSettings, "kvcache")},
    filter_order=(
        FilterOrder(
            "inference_request", "stored_responses", "stored_responses rewrites what inference_request reads", "error"
        ),
        FilterOrder("stored_responses", "kvcache", "kvcache predicts for prompts that lack their history"),
    ),
    verify=verify,
)
