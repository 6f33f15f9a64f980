"""Features, as far as the request path meets them: filters of the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvproxy.base.installed import BaseFeature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.settings.model import Model
    from kvproxy.base.types import Clock
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.settings import ClusterSettings
    from kvproxy.proxy.filters.chain import FilterContext, FilterType
    from kvproxy.proxy.forward.engine_request import HedgesRequests, SplitsRequests
    from kvproxy.proxy.forward.relay import EditsAnswers
    from kvproxy.proxy.settings import ServingSettings


class ProxyFeature(BaseFeature):
    """Contributions of a feature to the request path."""

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter around `inner`. Raises ConfigError, with paths relative to its settings."""
        raise NotImplementedError(name)

    def split_requests(self, cluster: Cluster, settings: ClusterSettings) -> SplitsRequests | None:
        """Return how requests of the cluster, which will have these settings, are sent in legs; None: each goes to one
        endpoint."""
        return None

    def hedge_requests(
        self, cluster: Cluster, settings: ClusterSettings, *, metrics: Metrics, clock: Clock
    ) -> HedgesRequests | None:
        """Return how requests of the cluster, which will have these settings, are sent twice; None: they are not."""
        return None

    def edit_answers(self, settings: Model, metrics: Metrics) -> EditsAnswers | None:
        """Return what changes the answers of a `router` with these settings; None: they go down as they come. The first
        feature that returns one is the only one to change them."""
        return None

    def list_guards(self, config: ServingSettings) -> Sequence[tuple[str, FilterType]]:
        """Return filters that stand right before the router in every chain, by name; they have no settings of their
        own."""
        return ()

    def needs_facts(self, config: ServingSettings) -> bool:
        """Return whether prompts are matched against the caches even if no policy needs that."""
        return False

    def list_notes(self) -> Mapping[str, type]:
        """Return the notes it leaves in `Outcome.notes`, by name: each is a field of receipts."""
        return {}
