"""Settings of the discovery from Kubernetes, and their place in the file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvproxy.base.settings.model import Model


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
