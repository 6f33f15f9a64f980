"""Settings of the endpoint picker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import Field

from kvproxy.base.settings.addresses import is_address, same_origin, url_fault
from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model, Port
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.settings import ListenerTls


class PickerSettings(Model):
    """Listener on which Envoy asks `kvproxy picker` for the endpoint of a request (gRPC, external processing)."""

    retired = {"lease": "a request that Envoy does not end counts as load for an hour"}

    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` for every interface."""
    port: Port = 9002
    """TCP port; 0 takes a free one and prints it."""
    tls: ListenerTls | None = None
    """Serve gRPC over TLS with this certificate."""
    fallbacks: int = Field(default=1, ge=0, le=8)
    """Endpoints named after the chosen one, in order, for Envoy to go to if that cannot be reached."""


class PickerPlace(Model):
    """The section of the top level."""

    picker: PickerSettings | None = None
    """Envoy's listener, with `kvproxy picker`; the defaults without one."""


def verify(config: Config) -> Iterator[Finding]:
    """Yield faults of the listener, if there is a section for it, and endpoints that Envoy does not find."""
    settings = part_of(config, PickerPlace).picker
    if settings is None:
        return
    from kvproxy.base.tls.files import verify_server_tls

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


def list_certificates(config: Config) -> Iterable[tuple[str, str]]:
    """Return the listener's."""
    settings = part_of(config, PickerPlace).picker
    if settings is None or settings.tls is None:
        return ()
    return (("picker.tls.certificate", settings.tls.certificate),)


SETTINGS = FeatureSettings(
    fields={Config: (PickerPlace,)}, read_at_start=("picker",), verify=verify, list_certificates=list_certificates
)
