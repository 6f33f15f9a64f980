"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.compose import part_of
from kvproxy.features.exchange.settings import SyncPlace
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature, StatusPart

if TYPE_CHECKING:
    from starlette.routing import Route

    from kvproxy.operate.admin.replies import Audit
    from kvproxy.operate.companion import Companion, Siblings
    from kvproxy.operate.merge import Rule
    from kvproxy.operate.runtime.operated import AdminTarget, OperatorFinding


class Exchange(Feature):
    """Has several processes decide as one."""

    name = "exchange"
    metric_group = "SyncMetrics"
    panel = "peers"

    def accompany(self, proxy: AdminTarget, config: Config, *, siblings: Siblings | None) -> Companion | None:
        """Return the service, where there are others to share with."""
        settings = part_of(config, SyncPlace).sync
        if siblings is None and settings.redis is None and settings.nats is None and settings.ray is None:
            return None
        from kvproxy.features.exchange.service import SyncService

        return SyncService(
            config,
            siblings=siblings,
            metrics=proxy.metrics,
            clock=proxy.clock,
            wall_clock=lambda: proxy.wall_clock().timestamp(),
        )

    def find_troubles(self, operated: AdminTarget) -> Iterable[OperatorFinding]:
        """Return what stands between this process and the others."""
        from kvproxy.features.exchange.operated import find_troubles

        return find_troubles(operated)

    def list_admin_routes(self, operated: AdminTarget, audit: Audit) -> Sequence[Route]:
        """Return `/sync`."""
        from kvproxy.features.exchange.operated import list_routes

        return list_routes(operated)

    def describe_live(self, operated: AdminTarget) -> Mapping[str, object]:
        """Return how it stands with the others; None: this process decides alone."""
        from kvproxy.features.exchange.operated import find_service

        service = find_service(operated)
        return {"sync": None if service is None else service.describe_state()}

    def merge_rules(self) -> Mapping[str, Mapping[str, Rule]]:
        """Return rules that merge the workers' data on other processes into one account."""
        from kvproxy.features.exchange.operated import MERGED
        from kvproxy.operate.merge import fields

        return {"/live": {"sync": fields(MERGED)}, "/sync": MERGED}

    def show_status(self, live: Mapping[str, Any], *, colour: bool) -> StatusPart:
        """Return a sentence and a table of the others."""
        from kvproxy.features.exchange.operated import show_peers

        return show_peers(live, colour=colour)


FEATURE = Exchange()
