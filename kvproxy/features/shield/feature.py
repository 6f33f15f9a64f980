"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

if TYPE_CHECKING:
    from kvproxy.operate.doctor.deployment import ClusterFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.runtime.operated import AdminTarget, OperatorFinding
    from kvproxy.proxy.filters.chain import FilterType


class ShieldMode(StrEnum):
    """Requests that would harm an engine, by the advisories for its version."""

    OFF = "off"  # engines' versions are not queried
    WARN = "warn"  # counted and logged
    REFUSE = "refuse"  # sent to an engine without the fault, else refused


class ShieldPlace(Model):
    """The top level."""

    shield: ShieldMode = ShieldMode.WARN
    """Requests that would harm an engine by a known fault of its version: `refuse` sends them to
    an engine without the fault, or answers 400 where there is none; `warn` counts and logs them; `off` does nothing."""


class Shield(Feature):
    """Keeps requests away from engines that they would harm."""

    name = "shield"
    metric_group = "ShieldMetrics"
    settings = {Config: (ShieldPlace,)}

    def list_guards(self, config: Config) -> Sequence[tuple[str, FilterType]]:
        """Return the filter, unless it is off."""
        from kvproxy.features.shield.filter import make_filter_type

        mode = _mode(config)
        return () if mode == "off" else (("shield", make_filter_type(refuses=mode == "refuse")),)

    def find_troubles(self, operated: AdminTarget) -> Iterable[OperatorFinding]:
        """Return the known faults of the engines."""
        from kvproxy.features.shield.findings import find_open_faults

        mode = _mode(operated.config)
        return () if mode == "off" else find_open_faults(operated.clusters, mode)

    def list_cluster_checks(self, cluster: ClusterFacts) -> Sequence[Check]:
        """Return the same for the doctor."""
        from kvproxy.features.shield.check import check_faults

        return () if _mode(cluster.deployment.config) == "off" else (check_faults(cluster),)


def _mode(config: Config) -> ShieldMode:
    return part_of(config, ShieldPlace).shield


FEATURE = Shield()
