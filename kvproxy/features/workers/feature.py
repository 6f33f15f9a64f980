"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.compose import part_of
from kvproxy.features.workers.settings import WorkersPlace
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature, StatusPart

if TYPE_CHECKING:
    from kvproxy.operate.feature import Run


class WorkersFeature(Feature):
    """Serves by several processes behind one socket."""

    name = "workers"
    metric_group = "WorkerMetrics"

    def find_runner(self, config: Config) -> Run | None:
        """Return the supervisor, unless one process is enough."""
        from kvproxy.features.workers.assignment import count_workers

        if count_workers(part_of(config, WorkersPlace).workers) == 1:
            return None
        from kvproxy.features.workers.serve import supervise_until_signal

        return supervise_until_signal

    def show_status(self, live: Mapping[str, Any], *, colour: bool) -> StatusPart:
        """Return how many serve."""
        workers = live.get("workers")
        if workers is None:
            return StatusPart()
        return StatusPart((f"{sum(one['serves'] for one in workers)} of {len(workers)} workers",))


FEATURE = WorkersFeature()
