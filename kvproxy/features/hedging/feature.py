"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.features.hedging.note import NOTE, HedgeNote, explain
from kvproxy.features.hedging.settings import HedgePlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.proxy.forward.engine_request import HedgesRequests


class Hedging(Feature):
    """Sends streams whose first byte is late to a second endpoint."""

    name = "hedging"
    metric_group = "HedgeMetrics"

    def hedge_requests(
        self, cluster: Cluster, settings: ClusterSettings, *, metrics: Metrics, clock: Clock
    ) -> HedgesRequests | None:
        """None while it is off."""
        if not part_of(settings, HedgePlace).hedge:
            return None
        from kvproxy.features.hedging.metrics import HedgeMetrics
        from kvproxy.features.hedging.race import Hedger

        return Hedger(cluster, metrics=metrics.group(HedgeMetrics), clock=clock)

    def list_notes(self) -> Mapping[str, type]:
        """Return the second sending of a request."""
        return {NOTE: HedgeNote}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield where it was sent as well, and what came of it."""
        from kvproxy.operate.receipts.receipt import note_of

        if (note := note_of(receipt, NOTE, HedgeNote)) is not None:
            yield explain(note)


FEATURE = Hedging()
