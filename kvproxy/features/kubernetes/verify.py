"""Checks of the settings that need more than one of them, or the machine."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.addresses import is_loopback, same_origin, url_fault
from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file, warning_at
from kvproxy.base.tls.files import ClientTls, verify_client_tls
from kvproxy.features.kubernetes.settings import KubernetesDiscoverySettings


def find_faults(settings: KubernetesDiscoverySettings, at: Path) -> Iterator[Finding]:
    """Yield the faults of the section at this path."""
    api = settings.api
    if api.url and (fault := url_fault(api.url)):
        yield error_at((*at, "api", "url"), fault)
    elif api.token_file and api.url.startswith("http://") and not is_loopback(same_origin(api.url)[1]):
        yield warning_at((*at, "api", "token_file"), "sent in clear text over http")
    if not api.url and (api.token_file or api.ca_file):
        what = "without `url` the pod's own service account is used"
        yield warning_at((*at, "api"), what, "add the url, or leave `api` out")
    tls = ClientTls(settings.ca_file, cert_file=settings.cert_file, key_file=settings.key_file)
    yield from verify_client_tls(at, tls)
    if api.ca_file:
        yield from missing_file((*at, "api", "ca_file"), api.ca_file)
