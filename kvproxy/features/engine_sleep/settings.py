"""Settings of engines that sleep."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model


class SleepPlace(Model):
    """A cluster."""

    wake_within: Duration = Field(default=0.0, le=3600)
    """A request for a model whose engines all sleep has one of them woken by vLLM's `/wake_up`, and is held for at most
    this long; 0: engines are woken by others."""
    sleep_after: Duration = Field(default=0.0, le=604_800)
    """Put engines to sleep by vLLM's `/sleep` that were idle for this long; 0: never. Needs `wake_within`."""
