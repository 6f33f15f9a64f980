"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Duration, Model
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature, StatusPart

if TYPE_CHECKING:
    from kvproxy.operate.feature import Run


class WorkersPlace(Model):
    """Keys that a configuration gets."""

    workers: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    """Processes that serve behind the one listening socket, decide as one, and share bounds; `auto`: one less than
    there are cores, at most 8. With 1 there is no supervisor and no exchange. Also `serve --workers`."""
    worker_timeout: Duration = Field(default=30, ge=0, le=3600)
    """A worker whose event loop stands still for so long (at least 2 s) is killed and started again; 0: never."""
    worker_start_timeout: Duration = Field(default=120, ge=0, le=3600)
    """So is one that does not serve so long after its start (at least 2 s; twice as long after each failed start in a
    row); 0: never."""


class WorkersFeature(Feature):
    """Serves by several processes behind one socket."""

    name = "workers"
    metric_group = "WorkerMetrics"
    settings = {Config: (WorkersPlace,)}
    read_at_start = ("workers",)

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
