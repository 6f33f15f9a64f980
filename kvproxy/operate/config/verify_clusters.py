"""Checks of the clusters and their endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath

from kvproxy.base.settings.addresses import is_loopback, listener_at, same_origin, url_fault
from kvproxy.base.settings.paths import Finding, Path, error_at, warning_at
from kvproxy.base.tls.files import ClientTls, verify_client_tls
from kvproxy.cluster.feature import list_policies
from kvproxy.cluster.settings import (
    OPTIONAL_POLICIES,
    ClusterSettings,
    EndpointSettings,
    EnginePriorityMode,
    PolicyName,
)
from kvproxy.operate.config.schema import Config

#: Policies that support the router queue.
FORECASTING = frozenset({PolicyName.KV_AWARE, PolicyName.LEAST_TTFT})
#: Keys that may hold clusters.
CLUSTERS_ARE_FROM: tuple[Path, ...] = (("clusters",), ("endpoints",), ("discovery",), ("policy",))


def _policies(cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    named: list[tuple[Path, PolicyName]] = [
        *(((), name) for name in list_policies(cluster) if name not in (cluster.policy, *cluster.client_policies)),
        (("policy",), cluster.policy),
        *((("client_policies", place), name) for place, name in enumerate(cluster.client_policies)),
    ]
    if optional := [(path, name) for path, name in named if name in OPTIONAL_POLICIES]:
        from kvproxy.cluster.routing.registry import policy_types  # few configurations have to load policies

        known = policy_types()
        for path, name in optional:
            if name not in known:
                yield error_at((*at, *path), f"no installed feature has the policy {name}")


def find_cluster_faults(config: Config) -> Iterator[Finding]:
    """Of each cluster by itself, and that there is one."""
    if not config.clusters:
        hint = "the shortest way is `endpoints: [http://host:port]`"
        yield error_at(("clusters",), "no cluster is configured", hint, follows=CLUSTERS_ARE_FROM)
    for name, cluster in config.clusters.items():
        at: Path = ("clusters", name)
        if not cluster.endpoints and not cluster.discovery.named:
            yield error_at((*at, "endpoints"), "the cluster has no endpoints and no discovery", absence=True)
        yield from _policies(cluster, at)
        yield from _endpoints(cluster, (*at, "endpoints"))
        yield from _loops(config, cluster, (*at, "endpoints"))
        if cluster.queue.enabled is True and cluster.policy not in FORECASTING:
            hint = "use kv_aware or least_ttft, or leave the queue out"
            yield error_at((*at, "queue"), f"{cluster.policy} does not estimate prefill times", hint)
        yield from _engine_priority(config, cluster, at)
        file = cluster.discovery.file
        if file is not None and not FilePath(file.path).is_file():
            yield warning_at((*at, "discovery", "file", "path"), "the file does not exist yet")
        if (dns := cluster.discovery.dns) is not None:
            tls = ClientTls(dns.ca_file, cert_file=dns.cert_file, key_file=dns.key_file)
            yield from verify_client_tls((*at, "discovery", "dns"), tls)


def _engine_priority(config: Config, cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    off = EnginePriorityMode.OFF
    modes = [cluster.engine_priority, *(endpoint.engine_priority for endpoint in cluster.endpoints)]
    if all(mode in (None, off) for mode in modes):
        if cluster.queue.priority_header and not cluster.queues:
            hint = "turn the queue on, or engine_priority"
            yield warning_at((*at, "queue", "priority_header"), "nothing reads it: no request waits by priority", hint)
        return
    first = next(index for index, mode in enumerate(modes) if mode not in (None, off))
    where = (*at, "engine_priority") if not first else (*at, "endpoints", first - 1, "engine_priority")
    if cluster.policy not in FORECASTING:
        hint = "use kv_aware or least_ttft, or leave engine_priority off"
        yield error_at(where, f"{cluster.policy} does not estimate prefill times", hint)
    if "inference_request" not in [spec.name for spec in config.filters]:
        yield error_at(where, "needs the filter inference_request: nothing else reads the body for the number")


def _endpoints(cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    ids: set[str] = set()
    names = {endpoint.id for endpoint in cluster.endpoints}
    instances: dict[str, str] = {}
    origins: dict[tuple[str, str, int, str], str] = {}
    for index, endpoint in enumerate(cluster.endpoints):
        here: Path = (*at, index)
        if endpoint.id in ids:
            yield error_at((*here, "id"), f"two endpoints have the id {endpoint.id!r}", "give each an id of its own")
        ids.add(endpoint.id)
        for rank in (endpoint.data_parallel or cluster.data_parallel).ranks:
            if f"{endpoint.id}@{rank}" in names:
                what = f"rank {rank} would be called as the endpoint '{endpoint.id}@{rank}'"
                yield error_at((*here, "id"), what, "give that endpoint another id")
        instance = endpoint.instance_id or endpoint.id
        if endpoint.id != instances.setdefault(instance, endpoint.id):
            yield warning_at(
                (*here, "instance_id"),
                f"the instance id {instance!r} also belongs to {instances[instance]!r}",
                "right only if both share one LMCache",
            )
        tls = ClientTls(endpoint.ca_file, cert_file=endpoint.cert_file, key_file=endpoint.key_file)
        yield from verify_client_tls(here, tls)
        if endpoint.insecure:
            yield warning_at((*here, "insecure"), "the endpoint's certificate is not verified")
        fault = url_fault(endpoint.url)
        if fault:
            yield error_at((*here, "url"), fault)
            continue
        if endpoint.url.rstrip("/").endswith("/v1"):
            yield warning_at((*here, "url"), "ends in /v1, which clients' paths already have", "leave it out")
        other = origins.setdefault(same_origin(endpoint.url), endpoint.id)
        if other != endpoint.id:
            yield warning_at((*here, "url"), f"the same engine as {other!r}: its load is counted separately")
        if endpoint.api_key is not None and endpoint.url.startswith("http://") and not _local(endpoint.url):
            yield warning_at((*here, "api_key"), "sent in clear text over http")
        if endpoint.retry is not None and endpoint.retry.max_backoff < endpoint.retry.backoff:
            yield error_at((*here, "retry", "max_backoff"), "shorter than backoff")


def _loops(config: Config, cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    """Yield endpoints that are the proxy itself, whose requests would come back without end."""
    for index, endpoint in enumerate(cluster.endpoints):
        if not url_fault(endpoint.url) and (fault := own_address_fault(config, endpoint)):
            yield error_at((*at, index, "url"), fault, "give the engine's address")


def own_address_fault(config: Config, endpoint: EndpointSettings) -> str:
    """Return what is wrong with an endpoint that is this proxy itself; "" for another one. Its URL is a good one."""
    listeners = {"listen": (config.listen.host, config.listen.port)}
    if config.admin.enabled:
        listeners["admin"] = (config.admin.host, config.admin.port)
    listener = listener_at(same_origin(endpoint.url), listeners)
    return f"this is the proxy's own address (`{listener}`): its requests would come back to it" if listener else ""


def _local(url: str) -> bool:
    return is_loopback(same_origin(url)[1])
