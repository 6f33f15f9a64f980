"""Checks across a decoded configuration: what each part allows alone but the whole does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path as FilePath

from kvproxy.config.addresses import is_address, is_loopback, listener_at, same_origin, url_fault
from kvproxy.config.cluster_schema import ClusterSettings, EnginePriorityMode, PolicyName
from kvproxy.config.discovery_schema import DiscoverySettings
from kvproxy.config.listener_schema import ListenerTls
from kvproxy.config.paths import Finding, Path, closest_word, error_at, missing_file, warning_at
from kvproxy.config.schema import Config, RouteSettings
from kvproxy.config.sync_schema import SyncSettings
from kvproxy.config.verify_filters import find_chain_faults

#: Policies the router queue can stand in front of.
FORECASTING = frozenset({PolicyName.KV_AWARE, PolicyName.LEAST_TTFT})
_CLUSTERS_ARE_FROM: tuple[Path, ...] = (("clusters",), ("endpoints",), ("discovery",), ("policy",))


def find_faults(config: Config) -> list[Finding]:
    """Everything wrong (or doubtful: severity `warning`) with the configuration as a whole."""
    checks = (_listeners, _tls, _picker, _limits, _clusters, _routes, _intervals, _sync, find_chain_faults)
    return [finding for check in checks for finding in check(config)]


def _listeners(config: Config) -> Iterator[Finding]:
    listen, admin = config.listen, config.admin
    if not listen.host:
        yield error_at(("listen", "host"), "must not be empty", "0.0.0.0 is every interface")
    if not admin.enabled:
        return
    if not admin.host:
        yield error_at(("admin", "host"), "must not be empty")
    elif not is_loopback(admin.host) and admin.token is None:
        yield error_at(("admin", "token"), "required when the admin listener is not on loopback")
    wildcard = {"0.0.0.0", "::"} & {listen.host, admin.host}
    if admin.port and admin.port == listen.port and (listen.host == admin.host or wildcard):
        yield error_at(("admin", "port"), "the admin listener has the public listener's address")


def _tls(config: Config) -> Iterator[Finding]:
    yield from _tls_files("listen", config.listen.tls)


def _tls_files(listener: str, tls: ListenerTls | None) -> Iterator[Finding]:
    for name, path in () if tls is None else tls:
        if path or name != "client_ca":
            yield from missing_file((listener, "tls", name), path)


def _picker(config: Config) -> Iterator[Finding]:
    picker = config.picker
    if picker is None:
        return
    if not picker.host:
        yield error_at(("picker", "host"), "must not be empty", "0.0.0.0 is every interface")
    admin = config.admin
    if admin.enabled and picker.port and picker.port == admin.port:
        yield error_at(("picker", "port"), "the picker has the admin listener's port")
    yield from _tls_files("picker", picker.tls)
    for name, cluster in config.clusters.items():
        for index, endpoint in enumerate(cluster.endpoints):
            if not url_fault(endpoint.url) and not is_address(same_origin(endpoint.url)[1]):
                what = "Envoy knows endpoints by address: it would not find this name, and go elsewhere"
                hint = "give the address, or let `discovery.dns` resolve it"
                yield warning_at(("clusters", name, "endpoints", index, "url"), what, hint)


def _limits(config: Config) -> Iterator[Finding]:
    if config.limits.bodies < config.limits.body:
        yield error_at(("limits", "bodies"), "less than limits.body: a body of that size would never fit")


def _clusters(config: Config) -> Iterator[Finding]:
    if not config.clusters:
        hint = "the shortest way is `endpoints: [http://host:port]`"
        yield error_at(("clusters",), "no cluster is configured", hint, follows=_CLUSTERS_ARE_FROM)
    for name, cluster in config.clusters.items():
        at: Path = ("clusters", name)
        if not cluster.endpoints and not cluster.discovery.named:
            yield error_at((*at, "endpoints"), "the cluster has no endpoints and no discovery", absence=True)
        yield from _endpoints(cluster, (*at, "endpoints"))
        yield from _loops(config, cluster, (*at, "endpoints"))
        if cluster.queue.enabled and cluster.policy not in FORECASTING:
            hint = "use kv_aware or least_ttft, or leave the queue out"
            yield error_at((*at, "queue"), f"{cluster.policy} does not know how long a prefill takes", hint)
        yield from _engine_priority(config, cluster, at)
        yield from _discovery(cluster.discovery, (*at, "discovery"))


def _discovery(settings: DiscoverySettings, at: Path) -> Iterator[Finding]:
    file, kubernetes, etcd = settings.file, settings.kubernetes, settings.etcd
    if file is not None and not FilePath(file.path).is_file():
        yield warning_at((*at, "file", "path"), "the file does not exist yet")
    given: list[tuple[Path, str]] = []
    if kubernetes is not None:
        api = kubernetes.api
        given = [(("kubernetes", "ca_file"), kubernetes.ca_file), (("kubernetes", "api", "ca_file"), api.ca_file)]
        if api.url and (fault := url_fault(api.url)):
            yield error_at((*at, "kubernetes", "api", "url"), fault)
        elif api.token_file and api.url.startswith("http://") and not _local(api.url):
            yield warning_at((*at, "kubernetes", "api", "token_file"), "sent in clear text over http")
        if not api.url and (api.token_file or api.ca_file):
            what = "without `url` the pod's own service account is used"
            yield warning_at((*at, "kubernetes", "api"), what, "add the url, or leave `api` out")
    if etcd is not None:
        given.append((("etcd", "ca_file"), etcd.ca_file))
        for index, url in enumerate(etcd.urls):
            if fault := url_fault(url):
                yield error_at((*at, "etcd", "urls", index), fault)
    for path, name in given:
        yield from missing_file((*at, *path), name) if name else ()


def _engine_priority(config: Config, cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    off = EnginePriorityMode.OFF
    modes = [cluster.engine_priority, *(endpoint.engine_priority for endpoint in cluster.endpoints)]
    if all(mode in (None, off) for mode in modes):
        if cluster.queue.priority_header and not cluster.queue.enabled:
            hint = "turn the queue on, or engine_priority"
            yield warning_at((*at, "queue", "priority_header"), "nothing reads it: no request waits by priority", hint)
        return
    first = next(index for index, mode in enumerate(modes) if mode not in (None, off))
    where = (*at, "engine_priority") if not first else (*at, "endpoints", first - 1, "engine_priority")
    if cluster.policy not in FORECASTING:
        hint = "use kv_aware or least_ttft, or leave engine_priority off"
        yield error_at(where, f"{cluster.policy} does not know how long a prefill takes", hint)
    if "inference_request" not in [spec.name for spec in config.filters]:
        yield error_at(where, "needs the filter inference_request: nothing else reads the body that gets the number")


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
        if endpoint.ca_file:
            yield from missing_file((*here, "ca_file"), endpoint.ca_file)
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
            yield warning_at((*here, "url"), f"the same engine as {other!r}: its load is counted apart")
        if endpoint.api_key is not None and endpoint.url.startswith("http://") and not _local(endpoint.url):
            yield warning_at((*here, "api_key"), "sent in clear text over http")
        if endpoint.retry is not None and endpoint.retry.max_backoff < endpoint.retry.backoff:
            yield error_at((*here, "retry", "max_backoff"), "shorter than backoff")


def _loops(config: Config, cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    """An endpoint that is the proxy itself would be sent its own requests without end."""
    listeners = {"listen": (config.listen.host, config.listen.port)}
    if config.admin.enabled:
        listeners["admin"] = (config.admin.host, config.admin.port)
    for index, endpoint in enumerate(cluster.endpoints):
        listener = "" if url_fault(endpoint.url) else listener_at(same_origin(endpoint.url), listeners)
        if listener:
            message = f"this is the proxy's own address (`{listener}`): its requests would come back to it"
            yield error_at((*at, index, "url"), message, "give the engine's address")


def _local(url: str) -> bool:
    return is_loopback(same_origin(url)[1])


def _routes(config: Config) -> Iterator[Finding]:
    earlier: list[RouteSettings] = []
    for index, route in enumerate(config.routes):
        at: Path = ("routes", index)
        if route.cluster not in config.clusters:
            hint, follows = _clusters_hint(route.cluster, config), () if config.clusters else _CLUSTERS_ARE_FROM
            yield error_at((*at, "cluster"), f"there is no cluster {route.cluster!r}", hint, follows=follows)
        if not route.prefix.startswith("/"):
            yield error_at((*at, "prefix"), "must start with /")
        if "*" in route.model[:-1]:
            yield error_at((*at, "model"), "a * may only stand at the end")
        if route.upstream_model and (not route.model or route.model.endswith("*")):
            yield error_at((*at, "upstream_model"), "needs a `model` without *: it is the alias for that one name")
        shadow = next((number for number, other in enumerate(earlier) if _covers(other, route)), None)
        if shadow is not None:
            yield error_at(at, f"never reached: routes[{shadow}] already matches all of it")
        earlier.append(route)
    for name, cluster in config.clusters.items() if not config.routes and len(config.clusters) > 1 else ():
        if not any(endpoint.models for endpoint in cluster.endpoints) and cluster.discovery == DiscoverySettings():
            yield error_at(("clusters", name), "no route leads here and no endpoint declares its models")
    used = {route.cluster for route in config.routes}
    for name in config.clusters if used and used <= set(config.clusters) else ():
        if name not in used:
            yield warning_at(("clusters", name), "no route leads to this cluster", follows=(("routes",),))


_STORES = {"redis": ("redis", "rediss", "unix"), "nats": ("nats", "tls", "ws", "wss")}


def _sync(config: Config) -> Iterator[Finding]:
    given = {name: url for name in _STORES if (url := getattr(config.sync, name)) is not None}
    if len(given) > 1:
        yield error_at(("sync", "nats"), "replicas meet at one place: redis or nats", "leave one of them out")
    for name, url in given.items():
        scheme, separator, rest = url.get_secret_value().partition("://")
        if not separator or scheme not in _STORES[name] or not rest:
            yield error_at(("sync", name), f"is no {name} URL", f"{_STORES[name][0]}://host:port")
        if importlib.util.find_spec(name) is None:
            yield error_at(("sync", name), f"the library for {name} is not installed", f"pip install 'kvproxy[{name}]'")
    if not given and config.sync != SyncSettings():
        hint = "replicas meet at sync.redis or sync.nats"
        yield warning_at(("sync",), "tells nobody but the workers of this machine, if there are several", hint)


def _clusters_hint(wrong: str, config: Config) -> str:
    close = closest_word(wrong, config.clusters)
    return f"did you mean {close!r}?" if close else f"clusters: {', '.join(sorted(config.clusters)) or 'none'}"


def _covers(wide: RouteSettings, narrow: RouteSettings) -> bool:
    """Whether every request `narrow` matches is already taken by `wide`."""
    if not f"{narrow.prefix.rstrip('/')}/".startswith(f"{wide.prefix.rstrip('/')}/"):
        return False
    if not wide.model and not narrow.model:
        return wide.cluster == narrow.cluster  # otherwise the models that the clusters' endpoints declare decide
    if wide.model.endswith("*"):
        return bool(narrow.model) and narrow.model.removesuffix("*").startswith(wide.model[:-1])
    return not wide.model or wide.model == narrow.model


def _intervals(config: Config) -> Iterator[Finding]:
    if config.retry.max_backoff < config.retry.backoff:
        yield error_at(("retry", "max_backoff"), "shorter than backoff")
    if config.pool.max_idle > config.pool.max_connections:
        yield warning_at(("pool", "max_idle"), "more than max_connections are never kept")
    for name in ("connect", "first_byte", "idle"):
        if getattr(config.timeouts, name) == 0:
            yield error_at(("timeouts", name), "must be longer than 0")
    for name, cluster in config.clusters.items():
        health, at = cluster.health, ("clusters", name, "health")
        if health.max_eject_for < health.eject_for:
            yield error_at((*at, "max_eject_for"), "shorter than eject_for")
        if health.active and (health.interval == 0 or health.timeout == 0):
            yield error_at((*at, "timeout" if health.interval else "interval"), "must be longer than 0")
        if not health.path.startswith("/"):
            yield error_at((*at, "path"), "must start with /")
