"""Where endpoints come from besides the static list, in the native configuration."""

from __future__ import annotations

from typing import Literal

from kvproxy.base.settings.model import Duration, Model, Port


class FileDiscoverySettings(Model):
    """Endpoints from a YAML or JSON file (a list of endpoints), watched for changes."""

    path: str
    """The file. With `credentials` `${VAR}` and `${VAR:-default}` in its values are replaced as they are here."""
    interval: Duration = 2.0
    """How often it is looked at."""
    credentials: bool = False
    """Its endpoints may name files, environment variables and credentials (`api_key`, `ca_file`, `${VAR}`). Off:
    one that does is left out, since whoever writes the file would read the proxy's files by it."""


class DnsDiscoverySettings(Model):
    """One endpoint for each address a name resolves to. Its id at the LMCache controller is `ADDRESS:PORT`."""

    host: str
    """The name."""
    port: Port
    """Port of every endpoint."""
    scheme: Literal["http", "https"] = "http"
    """How to speak to them."""
    interval: Duration = 10.0
    """How often the name is resolved."""
    models: tuple[str, ...] = ()
    """Models they serve."""
    ca_file: str = ""
    """PEM file to verify https endpoints with, for `host`; empty: the system's."""
    cert_file: str = ""
    """PEM file of the certificate to show https endpoints that require one, then its chain; empty: none."""
    key_file: str = ""
    """PEM file of its private key, without a pass phrase; empty: it is in `cert_file`."""


class DiscoverySettings(Model):
    """Where endpoints come from besides the static list."""

    file: FileDiscoverySettings | None = None
    """From a file."""
    dns: DnsDiscoverySettings | None = None
    """From DNS."""

    @property
    def named(self) -> bool:
        """True if any source is configured, those of features included."""
        return any(getattr(self, name) is not None for name in type(self).model_fields)
