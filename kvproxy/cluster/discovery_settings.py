"""Where endpoints come from besides the static list, in the native configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvproxy.base.settings.model import Duration, Model, Name, Port, Secret


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


class KubernetesApiSettings(Model):
    """How to reach the API of Kubernetes from outside; within a pod nothing of this is needed."""

    url: str = ""
    """`https://host:port`; empty: as a pod is told it, with its service account."""
    token_file: str = ""
    """File with a bearer token, read again for every request; empty: none is sent (`kubectl proxy`)."""
    ca_file: str = ""
    """PEM file to verify the API with; empty: the system's."""


class KubernetesDiscoverySettings(Model):
    """One endpoint for each ready pod of a service, or with some labels (see docs/kubernetes.md). Its id at the LMCache
    controller is `ADDRESS:PORT`, or what its annotation `kvproxy.io/instance-id` says."""

    service: str = Field(default="", max_length=63)
    """Name of a service: its EndpointSlices say which pods there are and which are ready."""
    selector: str = Field(default="", max_length=1000)
    """Label selector of pods, such as `app=vllm`: they are watched themselves. With `service` as well the service says
    which are ready, and labels and annotations of these pods what they serve."""
    namespace: str = Field(default="", max_length=63, pattern=r"^[a-z0-9-]*$")
    """Where these are; empty: where kvproxy runs."""
    port: str = Field(default="", max_length=63)
    """Name or number of the engines' port; empty: the only one they have."""
    scheme: Literal["http", "https"] = "http"
    """How to speak to them."""
    models: tuple[str, ...] = ()
    """Models they serve, where no annotation `kvproxy.io/models` says so."""
    server_name: str = ""
    """Name that the certificates of https endpoints are for; empty: their address."""
    ca_file: str = ""
    """PEM file to verify https endpoints with; empty: the system's."""
    api: KubernetesApiSettings = KubernetesApiSettings()
    """Where the API is, outside of a cluster."""

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if not (self.service or self.selector):
            raise ValueError("needs `service`, `selector`, or both")
        return self


class EtcdDiscoverySettings(Model):
    """One endpoint for each key below a prefix, over etcd's JSON gateway (etcd 3.4 or newer)."""

    urls: tuple[str, ...] = Field(min_length=1, max_length=16)
    """Of the members of the etcd cluster, such as `http://etcd:2379`; the next one is asked when one fails."""
    prefix: str = Field(min_length=1, max_length=1000)
    """Such as `/kvproxy/endpoints/`. The rest of a key is the endpoint's id, its value the endpoint as JSON, with the
    fields it has here, or its URL alone. Give the keys a lease, and endpoints end with their engines."""
    models: tuple[str, ...] = ()
    """Models they serve, where their values do not say it."""
    ca_file: str = ""
    """PEM file to verify https with; empty: the system's."""
    user: Name | Literal[""] = ""
    """Of etcd, with the right to read the prefix; empty: its authentication is off."""
    password: Secret | None = None
    """Of that user."""
    credentials: bool = False
    """Its endpoints may name files and credentials (`api_key`, `ca_file`), as of the file."""


class DiscoverySettings(Model):
    """Where endpoints come from besides the static list."""

    file: FileDiscoverySettings | None = None
    """From a file."""
    dns: DnsDiscoverySettings | None = None
    """From DNS."""
    kubernetes: KubernetesDiscoverySettings | None = None
    """From the API of Kubernetes, at once when something changes."""
    etcd: EtcdDiscoverySettings | None = None
    """From etcd, at once when something changes."""

    @property
    def named(self) -> bool:
        """Whether there is any."""
        return any((self.file, self.dns, self.kubernetes, self.etcd))
