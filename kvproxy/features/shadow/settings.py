"""Settings of shadow policies."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.verify import find_missing_policy


class ShadowPlace(Model):
    """The key that each cluster gets."""

    shadow_policy: PolicyName | None = None
    """A second policy that decides on the same traffic without effect; how it differs is counted. Empty: none."""


def verify(config: Config) -> Iterator[Finding]:
    """Refuse policies that no installed feature has."""
    for name, cluster in config.clusters.items():
        if (policy := part_of(cluster, ShadowPlace).shadow_policy) is not None:
            yield from find_missing_policy(policy, ("clusters", name, "shadow_policy"))


SETTINGS = FeatureSettings(fields={ClusterSettings: (ShadowPlace,)}, verify=verify)
