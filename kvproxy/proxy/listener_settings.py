"""Where it listens: for clients, for Envoy, and for its operator."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Duration, Model, Port, Secret
from kvproxy.base.tls.files import ServerTls


class ListenerTls(Model):
    """Certificate of a listener."""

    certificate: str
    """PEM file: the certificate, then its chain."""
    private_key: str
    """PEM file of the private key, without a pass phrase."""
    client_ca: str = ""
    """PEM file of authorities: who connects must show a certificate of one of them; empty: none is asked for."""

    @property
    def files(self) -> ServerTls:
        """The files, to be loaded."""
        return ServerTls(self.certificate, self.private_key, self.client_ca)


class ListenerSettings(Model):
    """Where clients connect. Also written as `host:port`."""

    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` for every interface."""
    port: Port = 8888
    """TCP port; 0 takes a free one and prints it."""
    tls: ListenerTls | None = None
    """Serve https with this certificate."""
    reuse_port: bool = False
    """Listen beside another kvproxy at the same port: start the new process, then end the old one. A port that is taken
    by mistake is no error then."""


class PickerSettings(Model):
    """Where Envoy asks `kvproxy picker` which endpoint a request goes to (gRPC, external processing)."""

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


class AdminSettings(Model):
    """The operator's listener: metrics, health, status. Never on the public one."""

    enabled: bool = True
    """Turn the admin listener off altogether."""
    host: str = "127.0.0.1"
    """Address to bind; anything but loopback requires `token`."""
    port: Port = 8889
    """TCP port; 0 takes a free one and prints it."""
    token: Secret | None = None
    """Bearer token every admin request must carry."""
