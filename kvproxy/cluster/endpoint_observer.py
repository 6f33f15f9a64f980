"""How features observe an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvproxy.cluster.settings import ClusterSettings, EndpointSettings


class EndpointObserver:
    """Observes one endpoint as long as it is there."""

    __slots__ = ()

    @property
    def follows_requests(self) -> bool:
        """Return True if `first_token` and `request_over` are to be called, by the settings."""
        return False

    def configure(self, config: EndpointSettings, settings: ClusterSettings) -> None:
        """Apply the configuration."""

    def first_token(self, request: object, placed_at: float, now: float) -> None:
        """Note the first token of a request that was placed here at that time; not called where it cannot be seen."""

    def request_over(self, request: object) -> None:
        """Note the end of a request here."""

    def process_replaced(self) -> None:
        """Forget findings: the engine is another process, maybe with other flags."""

    def bind_gauges(self) -> None:
        """Bind its gauges by `endpoint.metrics`. Called again after each change of the settings."""

    def describe(self, now: float) -> Mapping[str, object]:
        """Return keys that it adds to the endpoint's status."""
        return {}
