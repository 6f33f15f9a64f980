"""Features, as far as the request path meets them: filters of the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvproxy.base.errors import Severity
from kvproxy.base.installed import BaseFeature

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.settings.model import Model
    from kvproxy.base.types import Clock
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.settings import ClusterSettings
    from kvproxy.proxy.filters.chain import FilterContext
    from kvproxy.proxy.forward.engine_request import HedgesRequests, SplitsRequests
    from kvproxy.proxy.forward.relay import EditsAnswers
    from kvproxy.proxy.settings import ServingSettings


class FilterOrder(NamedTuple):
    """Two filters, and why the other order is wrong (`error`) or doubtful."""

    early: str
    late: str
    why: str
    severity: Severity = "warning"


class FilterPlace(NamedTuple):
    """Place of a filter in a chain that is not written out: right before a filter of the core, after those of features
    earlier in the list."""

    name: str
    before: str
    default: bool = False  # in the chain if the configuration does not name it


class ProxyFeature(BaseFeature):
    """Contributions of a feature to the request path."""

    #: Filters by name, each with the model of its settings.
    filters: ClassVar[Mapping[str, type[Model]]] = {}
    #: Filters that do not stand where third-party filters do.
    filter_places: ClassVar[Sequence[FilterPlace]] = ()
    filter_order: ClassVar[Sequence[FilterOrder]] = ()

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

    def needs_facts(self, config: ServingSettings) -> bool:
        """Return whether prompts are matched against the caches even if no policy needs that."""
        return False

    def list_notes(self) -> Mapping[str, type]:
        """Return the notes it leaves in `Outcome.notes`, by name: each is a field of receipts."""
        return {}
