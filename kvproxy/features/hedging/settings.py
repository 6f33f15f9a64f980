"""Settings of hedging."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, warning_at
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.schema import Config


class HedgePlace(Model):
    """A cluster."""

    hedge: bool = False
    """Send a stream to a second endpoint once its first byte is later than expected by more than the prompt would cost
    there; the slower one is cancelled. Takes from the retry budget."""


def verify(config: Config) -> Iterator[Finding]:
    """Doubt hedging by a policy that does not learn how long a prefill takes."""
    for name, cluster in config.clusters.items():
        if not part_of(cluster, HedgePlace).hedge:
            continue
        from kvproxy.cluster.routing.registry import policy_types  # slow to import

        if not policy_types()[cluster.policy].learns_speeds:
            what = f"has no effect with {cluster.policy.value}, which does not learn how long a prefill takes"
            yield warning_at(("clusters", name, "hedge"), what, "policy: kv_aware")


SETTINGS = FeatureSettings(fields={ClusterSettings: (HedgePlace,)}, verify=verify)
