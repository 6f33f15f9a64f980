"""Settings of endpoints from etcd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model, Name, Secret
from kvproxy.base.settings.paths import Finding, error_at, missing_file
from kvproxy.cluster.settings import DiscoverySettings
from kvproxy.operate.config.schema import Config


class EtcdDiscoverySettings(Model):
    """One endpoint for each key below a prefix, over etcd's JSON gateway (etcd 3.4 or newer)."""

    urls: tuple[str, ...] = Field(min_length=1, max_length=16)
    """Of the members of the etcd cluster, such as `http://etcd:2379`; the next one is used when one fails."""
    prefix: str = Field(min_length=1, max_length=1000)
    """Such as `/kvproxy/endpoints/`. The rest of a key is the endpoint's id, its value the endpoint as JSON, with the
    fields it has here, or its URL alone. Give the keys a lease, and endpoints end with their engines."""
    models: tuple[str, ...] = ()
    """Models they serve, unless their values name them."""
    ca_file: str = ""
    """PEM file to verify https with; empty: the system's."""
    user: Name | Literal[""] = ""
    """Of etcd, with the right to read the prefix; empty: its authentication is off."""
    password: Secret | None = None
    """Of that user."""
    credentials: bool = False
    """Its endpoints may name files and credentials (`api_key`, `ca_file`), as of the file."""


class EtcdPlace(Model):
    """Section `etcd` of a discovery."""

    etcd: EtcdDiscoverySettings | None = None
    """From etcd, at once when something changes."""


def verify(config: Config) -> Iterator[Finding]:
    """Check the URLs, and that the file is there."""
    for name, cluster in config.clusters.items():
        settings = part_of(cluster.discovery, EtcdPlace).etcd
        if settings is None:
            continue
        at = ("clusters", name, "discovery", "etcd")
        for index, url in enumerate(settings.urls):
            if fault := url_fault(url):
                yield error_at((*at, "urls", index), fault)
        if settings.ca_file:
            yield from missing_file((*at, "ca_file"), settings.ca_file)


SETTINGS = FeatureSettings(fields={DiscoverySettings: (EtcdPlace,)}, verify=verify)
