"""Where it listens: for clients, for Envoy, and for its operator."""

from __future__ import annotations

from kvproxy.base.settings.model import Model, Port, Secret
from kvproxy.base.tls.files import ServerTls


class ListenerTls(Model):
    """Certificate of a listener."""

    certificate: str
    """PEM file: the certificate, then its chain."""
    private_key: str
    """PEM file of the private key, without a pass phrase."""
    client_ca: str = ""
    """PEM file of authorities: clients must show a certificate of one of them; empty: none is required."""

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
