"""Settings of engines that sleep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model, Name, Secret


class WakeCallSettings(Model):
    """An HTTP call that starts engines."""

    url: str
    """Where, without a query."""
    method: Literal["POST", "PUT", "GET"] = "POST"
    """With an empty body."""
    headers: Mapping[Name, Secret] = {}
    """Header fields, such as `authorization: Bearer ${SCALER_TOKEN}`."""


class SleepPlace(Model):
    """A cluster."""

    wake_within: Duration = Field(default=0.0, le=3600)
    """A request for a model whose engines all sleep has one of them woken by vLLM's `/wake_up`, and is held for at most
    this long; 0: engines are woken by others."""
    wake_call: WakeCallSettings | None = None
    """Made for a request while discovery finds no endpoint, so that another program starts one; the request is held
    for at most `wake_within`."""
    sleep_after: Duration = Field(default=0.0, le=604_800)
    """Put engines to sleep by vLLM's `/sleep` that were idle for this long; 0: never. Needs `wake_within`."""
