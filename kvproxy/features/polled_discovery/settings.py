"""Settings of endpoints from files and DNS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model, Port
from kvproxy.base.settings.paths import Finding, warning_at
from kvproxy.cluster.settings import DiscoverySettings
from kvproxy.operate.config.schema import Config


class FileDiscoverySettings(Model):
    """Endpoints from a YAML or JSON file (a list of endpoints), watched for changes."""

    retired = {"interval": "the file is looked at every two seconds"}

    path: str
    """The file. With `credentials` `${VAR}` and `${VAR:-default}` in its values are replaced as they are here."""
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
    """How often the name is resolved, whatever the TTL of its records."""
    models: tuple[str, ...] = ()
    """Models they serve."""
    ca_file: str = ""
    """PEM file to verify https endpoints with, for `host`; empty: the system's."""
    cert_file: str = ""
    """PEM file of the certificate to show https endpoints that require one, then its chain; empty: none."""
    key_file: str = ""
    """PEM file of its private key, without a pass phrase; empty: it is in `cert_file`."""


class PolledPlace(Model):
    """Sections of a discovery."""

    file: FileDiscoverySettings | None = None
    """From a file."""
    dns: DnsDiscoverySettings | None = None
    """From DNS."""


def verify(config: Config) -> Iterator[Finding]:
    """Check that the files are there."""
    for name, cluster in config.clusters.items():
        at = ("clusters", name, "discovery")
        settings = part_of(cluster.discovery, PolledPlace)
        if settings.file is not None and not Path(settings.file.path).is_file():
            yield warning_at((*at, "file", "path"), "the file does not exist yet")
        dns = settings.dns
        if dns is not None and (dns.ca_file or dns.cert_file or dns.key_file):
            from kvproxy.base.tls.files import ClientTls, verify_client_tls

            tls = ClientTls(dns.ca_file, cert_file=dns.cert_file, key_file=dns.key_file)
            yield from verify_client_tls((*at, "dns"), tls)


SETTINGS = FeatureSettings(fields={DiscoverySettings: (PolledPlace,)}, verify=verify)
