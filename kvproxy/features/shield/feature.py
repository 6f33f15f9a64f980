"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.features.shield.settings import ShieldMode, ShieldPlace
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.runtime.operated import AdminTarget, OperatorFinding
    from kvproxy.proxy.filters.chain import FilterType
    from kvproxy.proxy.settings import ServingSettings


class Shield(Feature):
    """Keeps requests away from engines that they would harm."""

    name = "shield"
    metric_group = "ShieldMetrics"

    def list_guards(self, config: ServingSettings) -> Sequence[tuple[str, FilterType]]:
        """Return the filter, unless it is off."""
        from kvproxy.features.shield.filter import make_filter_type

        mode = _mode(config)
        return () if mode == "off" else (("shield", make_filter_type(refuses=mode == "refuse")),)

    def find_troubles(self, operated: AdminTarget) -> Iterable[OperatorFinding]:
        """Return the known faults of the engines."""
        from kvproxy.features.shield.findings import find_open_faults

        mode = _mode(operated.config)
        return () if mode == "off" else find_open_faults(operated.clusters, mode)

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Sequence[Check]:
        """Return the same for the doctor."""
        from kvproxy.features.shield.check import check_faults

        is_on = _mode(deployment.config) != "off"
        return [check_faults(cluster) for cluster in deployment.clusters] if is_on else ()


def _mode(config: ServingSettings) -> ShieldMode:
    return part_of(config, ShieldPlace).shield


FEATURE = Shield()
