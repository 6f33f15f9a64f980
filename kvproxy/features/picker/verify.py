"""Checks of the picker's settings beside the rest of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.addresses import is_address, same_origin, url_fault
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.base.tls.files import verify_server_tls
from kvproxy.features.picker.settings import PickerSettings
from kvproxy.operate.config.schema import Config


def find_faults(settings: PickerSettings, config: Config) -> Iterator[Finding]:
    """Yield faults of its listener, and endpoints that Envoy does not find."""
    if not settings.host:
        yield error_at(("picker", "host"), "must not be empty", "0.0.0.0 is every interface")
    admin = config.admin
    if admin.enabled and settings.port and settings.port == admin.port:
        yield error_at(("picker", "port"), "the picker has the admin listener's port")
    if settings.tls is not None:
        yield from verify_server_tls(("picker", "tls"), settings.tls.files)
    for name, cluster in config.clusters.items():
        for index, endpoint in enumerate(cluster.endpoints):
            if not url_fault(endpoint.url) and not is_address(same_origin(endpoint.url)[1]):
                what = "Envoy knows endpoints by address: it would not find this name, and go elsewhere"
                hint = "give the address, or let `discovery.dns` resolve it"
                yield warning_at(("clusters", name, "endpoints", index, "url"), what, hint)
