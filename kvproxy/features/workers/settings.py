"""Settings of workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model
from kvproxy.operate.config.schema import Config


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


SETTINGS = FeatureSettings(fields={Config: (WorkersPlace,)}, read_at_start=("workers",))
