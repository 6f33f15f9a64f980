"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, warning_at
from kvproxy.base.types import EndpointId
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.proxy.forward.engine_request import HedgesRequests


class HedgePlace(Model):
    """A cluster."""

    hedge: bool = False
    """Send a stream to a second endpoint once its first byte is later than expected by more than the prompt would cost
    there; the slower one is cancelled. Takes from the retry budget."""


#: Its name.
NOTE = "hedge"

WON = "won"
LOST = "lost"
FAILED = "failed"
LEFT = "left"
REFUSED = "refused"


class HedgeNote(msgspec.Struct, omit_defaults=True):
    """The second endpoint, when it got the request, and when the first one was expected to answer, both in seconds
    since that got it."""

    endpoint: EndpointId
    after_s: float
    expected_s: float
    result: str = LEFT


_RESULTS = {
    WON: "answered first",
    LOST: "was slower and was cancelled",
    FAILED: "failed as well",
    LEFT: "had not answered when the client left",
}


class Hedging(Feature):
    """Sends streams whose first byte is late to a second endpoint."""

    name = "hedging"
    metric_group = "HedgeMetrics"
    settings = {ClusterSettings: (HedgePlace,)}

    def verify(self, config: Config) -> Iterator[Finding]:
        """Doubt hedging by a policy that does not learn how long a prefill takes."""
        for name, cluster in config.clusters.items():
            if not part_of(cluster, HedgePlace).hedge:
                continue
            from kvproxy.cluster.routing.registry import policy_types  # slow to import

            if not policy_types()[cluster.policy].learns_speeds:
                what = f"has no effect with {cluster.policy.value}, which does not learn how long a prefill takes"
                yield warning_at(("clusters", name, "hedge"), what, "policy: kv_aware")

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


def explain(note: HedgeNote) -> str:
    """Return a sentence about the second sending."""
    late = f"after {note.after_s:.3f} s without a first byte ({note.expected_s:.3f} s expected)"
    return f"{late} it was sent to {note.endpoint} as well, which {_RESULTS.get(note.result, note.result)}"


FEATURE = Hedging()
