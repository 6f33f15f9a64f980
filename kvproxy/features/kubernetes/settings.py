"""Settings of endpoints from Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from kvproxy.base.settings.addresses import is_loopback, same_origin, url_fault
from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file, warning_at
from kvproxy.cluster.settings import DiscoverySettings
from kvproxy.operate.config.schema import Config


class KubernetesApiSettings(Model):
    """How to reach the API of Kubernetes from outside; within a pod nothing of this is needed."""

    url: str = ""
    """`https://host:port`; empty: the address in a pod's environment, with its service account."""
    token_file: str = ""
    """File with a bearer token, read again for every request; empty: none is sent (`kubectl proxy`)."""
    ca_file: str = ""
    """PEM file to verify the API with; empty: the system's."""


class KubernetesDiscoverySettings(Model):
    """One endpoint for each ready pod of a service, or with some labels. Its id at the LMCache controller is
    `ADDRESS:PORT`, or the value of its annotation `kvproxy.io/instance-id`."""

    service: str = Field(default="", max_length=63)
    """Name of a service: its EndpointSlices list the pods and which are ready."""
    selector: str = Field(default="", max_length=1000)
    """Label selector of pods, such as `app=vllm`: they are watched themselves. With `service` as well the service
    decides which are ready, and labels and annotations of these pods what they serve."""
    namespace: str = Field(default="", max_length=63, pattern=r"^[a-z0-9-]*$")
    """Where these are; empty: where kvproxy runs."""
    port: str = Field(default="", max_length=63)
    """Name or number of the engines' port; empty: the only one they have."""
    scheme: Literal["http", "https"] = "http"
    """How to speak to them."""
    models: tuple[str, ...] = ()
    """Models they serve, unless an annotation `kvproxy.io/models` lists them."""
    server_name: str = ""
    """Name that the certificates of https endpoints are for; empty: their address."""
    ca_file: str = ""
    """PEM file to verify https endpoints with; empty: the system's."""
    cert_file: str = ""
    """PEM file of the certificate to show https endpoints that require one, then its chain; empty: none."""
    key_file: str = ""
    """PEM file of its private key, without a pass phrase; empty: it is in `cert_file`."""
    scale: str = Field(default="", max_length=300, pattern=r"^((deployments|statefulsets)/[a-z0-9.-]+)?$")
    """`deployments/NAME` or `statefulsets/NAME`, which is scaled to one pod when it has none and a request comes
    (`wake_within` of the cluster); empty: others scale it."""
    api: KubernetesApiSettings = KubernetesApiSettings()
    """Where the API is, outside of a cluster."""

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if not (self.service or self.selector):
            raise ValueError("needs `service`, `selector`, or both")
        return self


class KubernetesPlace(Model):
    """Section `kubernetes` of a discovery."""

    kubernetes: KubernetesDiscoverySettings | None = None
    """From the API of Kubernetes, at once when something changes."""


def _find_faults(settings: KubernetesDiscoverySettings, at: Path) -> Iterator[Finding]:
    from kvproxy.base.tls.files import ClientTls, verify_client_tls

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


def verify(config: Config) -> Iterator[Finding]:
    """Check that files are there, and how the API is reached."""
    for name, cluster in config.clusters.items():
        settings = part_of(cluster.discovery, KubernetesPlace).kubernetes
        if settings is not None:
            yield from _find_faults(settings, ("clusters", name, "discovery", "kubernetes"))


SETTINGS = FeatureSettings(fields={DiscoverySettings: (KubernetesPlace,)}, verify=verify)
