"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import MetricGroup
    from kvproxy.operate.admin.operated import AdminTarget, OperatorFinding
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.proxy.filters.chain import FilterType


class Shield(Feature):
    """Keeps requests away from engines that they would harm."""

    name = "shield"

    def list_metrics(self) -> Sequence[type[MetricGroup]]:
        """Its group."""
        from kvproxy.features.shield.metrics import ShieldMetrics

        return (ShieldMetrics,)

    def list_guards(self, config: Config) -> Sequence[tuple[str, FilterType]]:
        """Return the filter, unless it is off."""
        from kvproxy.features.shield.filter import make_filter_type

        return () if config.shield == "off" else (("shield", make_filter_type(refuses=config.shield == "refuse")),)

    def find_troubles(self, operated: AdminTarget) -> Iterable[OperatorFinding]:
        """Return the known faults of the engines."""
        from kvproxy.features.shield.findings import find_open_faults

        mode = operated.config.shield
        return () if mode == "off" else find_open_faults(operated.clusters, mode)

    def list_cluster_checks(self, deployment: Deployment, cluster: str) -> Sequence[Check]:
        """Return the same for the doctor."""
        from kvproxy.features.shield.findings import FaultsCheck

        return () if deployment.config.shield == "off" else (FaultsCheck(deployment, cluster),)


FEATURE = Shield()
