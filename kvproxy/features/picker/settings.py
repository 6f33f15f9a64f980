"""Settings of the picker, which Envoy calls."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model, Port
from kvproxy.proxy.settings import ListenerTls


class PickerSettings(Model):
    """Listener on which Envoy asks `kvproxy picker` for the endpoint of a request (gRPC, external processing)."""

    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` for every interface."""
    port: Port = 9002
    """TCP port; 0 takes a free one and prints it."""
    tls: ListenerTls | None = None
    """Serve gRPC over TLS with this certificate."""
    fallbacks: int = Field(default=1, ge=0, le=8)
    """Endpoints named after the chosen one, in order, for Envoy to go to if that cannot be reached."""
    lease: Duration = Field(default=3600.0, gt=0, le=86_400)
    """A request counts as load of its endpoint until Envoy says that it is over, and never longer than this."""


class PickerPlace(Model):
    """The section of the top level."""

    picker: PickerSettings | None = None
    """Envoy's listener, with `kvproxy picker`; the defaults without one."""
