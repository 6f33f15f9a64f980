"""Checks of the settings that need the machine."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file
from kvproxy.features.etcd.settings import EtcdDiscoverySettings


def find_faults(settings: EtcdDiscoverySettings, at: Path) -> Iterator[Finding]:
    """Yield the faults of the section at this path."""
    for index, url in enumerate(settings.urls):
        if fault := url_fault(url):
            yield error_at((*at, "urls", index), fault)
    if settings.ca_file:
        yield from missing_file((*at, "ca_file"), settings.ca_file)
