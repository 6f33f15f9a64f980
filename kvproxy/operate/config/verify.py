"""Checks across a decoded configuration: what each part allows alone but the whole does not."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvproxy.base.settings.addresses import is_loopback, same_origin, url_fault
from kvproxy.base.settings.feature_settings import FilterOrder, settings_of_features
from kvproxy.base.settings.paths import Finding, Path, error_at, warning_at
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.settings import (
    OPTIONAL_POLICIES,
    ClusterSettings,
    EndpointSettings,
    EnginePriorityMode,
    PolicyName,
    RouteSettings,
)
from kvproxy.operate.config.decode import closest_word
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.filter_settings import (
    RouterSettings,
    filter_models,
)


def find_faults(config: Config) -> list[Finding]:
    """Everything wrong (or doubtful: severity `warning`) with the configuration as a whole."""
    checks = (_listeners, _tls, _limits, find_cluster_faults, _routes, _intervals, find_chain_faults)
    found = [finding for check in checks for finding in check(config)]
    return found + [finding for feature in settings_of_features() for finding in feature.verify(config)]


def _listeners(config: Config) -> Iterator[Finding]:
    listen = config.listen
    admin = config.admin
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
    if config.listen.tls is not None:
        from kvproxy.base.tls.files import verify_server_tls

        yield from verify_server_tls(("listen", "tls"), config.listen.tls.files)


def _limits(config: Config) -> Iterator[Finding]:
    if config.limits.bodies < config.limits.body:
        yield error_at(("limits", "bodies"), "less than limits.body: a body of that size would never fit")


def _routes(config: Config) -> Iterator[Finding]:
    earlier: list[RouteSettings] = []
    for index, route in enumerate(config.routes):
        at: Path = ("routes", index)
        if route.cluster not in config.clusters:
            hint = _clusters_hint(route.cluster, config)
            follows = () if config.clusters else CLUSTERS_ARE_FROM
            yield error_at((*at, "cluster"), f"there is no cluster {route.cluster!r}", hint, follows=follows)
        if not route.prefix.startswith("/"):
            yield error_at((*at, "prefix"), "must start with /")
        if "*" in route.model[:-1]:
            yield error_at((*at, "model"), "a * may only stand at the end")
        if route.upstream_model and (not route.model or route.model.endswith("*")):
            yield error_at((*at, "upstream_model"), "needs a `model` without *: it is the alias for that one name")
        earliest = next((number for number, other in enumerate(earlier) if _covers(other, route)), None)
        if earliest is not None:
            yield error_at(at, f"never reached: routes[{earliest}] already matches all of it")
        earlier.append(route)
    for name, cluster in config.clusters.items() if not config.routes and len(config.clusters) > 1 else ():
        if not any(endpoint.models for endpoint in cluster.endpoints) and not cluster.discovery.named:
            yield error_at(("clusters", name), "no route leads here and no endpoint declares its models")
    used = {route.cluster for route in config.routes}
    for name in config.clusters if used and used <= set(config.clusters) else ():
        if name not in used:
            yield warning_at(("clusters", name), "no route leads to this cluster", follows=(("routes",),))


def _clusters_hint(wrong: str, config: Config) -> str:
    close = closest_word(wrong, config.clusters)
    return f"did you mean {close!r}?" if close else f"clusters: {', '.join(sorted(config.clusters)) or 'none'}"


def _covers(wide: RouteSettings, narrow: RouteSettings) -> bool:
    """Return True if `wide` takes every request that `narrow` matches."""
    if not f"{narrow.prefix.rstrip('/')}/".startswith(f"{wide.prefix.rstrip('/')}/"):
        return False
    if not wide.model and not narrow.model:
        return wide.cluster == narrow.cluster  # otherwise the models that the clusters' endpoints declare decide
    if wide.model.endswith("*"):
        return bool(narrow.model) and narrow.model.removesuffix("*").startswith(wide.model[:-1])
    return not wide.model or wide.model == narrow.model


def _intervals(config: Config) -> Iterator[Finding]:
    for name in ("connect", "first_byte", "idle"):
        if getattr(config.timeouts, name) == 0:
            yield error_at(("timeouts", name), "must be longer than 0")
    for name, cluster in config.clusters.items():
        health = cluster.health
        at = ("clusters", name, "health")
        if health.active and (health.interval == 0 or health.timeout == 0):
            yield error_at((*at, "timeout" if health.interval else "interval"), "must be longer than 0")
        if not health.path.startswith("/"):
            yield error_at((*at, "path"), "must start with /")


_ORDER = (
    FilterOrder("inference_request", "kvcache", "kvcache needs the request that inference_request parses", "error"),
)


def find_chain_faults(config: Config) -> Iterator[Finding]:
    """Yield findings about the chain as a whole, then about each filter."""
    names = [spec.name for spec in config.filters]
    yield from _ends_with_router(names)
    yield from _order(names)
    yield from _without_facts(config, names)
    if "inference_request" not in names:
        yield from _without_parsing(config, names)
    for index, spec in enumerate(config.filters):
        check = _SETTINGS.get(spec.name)
        if check is not None and isinstance(spec.settings, filter_models()[spec.name]):
            yield from check(spec.settings, ("filters", index), config)


def _ends_with_router(names: list[str]) -> Iterator[Finding]:
    if "router" not in names:
        yield error_at(("filters",), "no filter forwards requests", "the last must be `router`")
        return
    for index in range(names.index("router") + 1, len(names)):
        if names[index] != "router":
            yield error_at(("filters", index), "never reached: it comes after router")


def _order(names: list[str]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            yield error_at(("filters", index), f"{name} is already in the chain, at filters[{first[name]}]")
        first.setdefault(name, index)
    added = (order for feature in settings_of_features() for order in feature.filter_order)
    for early, late, why, severity in (*_ORDER, *added):
        if early in first and late in first and first[late] < first[early]:
            found = error_at if severity == "error" else warning_at
            yield found(("filters", first[late]), why, f"put {early} before {late}")


def _without_facts(config: Config, names: list[str]) -> Iterator[Finding]:
    """Yield findings about a policy that weighs cached prefixes in a chain without the filters that find them."""
    lacking = [name for name in ("inference_request", "kvcache") if name not in names]
    off = [
        index
        for index, spec in enumerate(config.filters)
        if isinstance(spec.settings, KvCacheSettings) and not spec.settings.enabled
    ]
    weighing = _policies_by_facts(config) if off or "kvcache" in lacking else []
    if "kvcache" in lacking and weighing:
        lines = " and ".join(f"`- {name}`" for name in lacking)
        hint = f"add {lines} before `- router`; or `filters` as a mapping, which adds to the default chain"
        what = f"{weighing[0]} weighs cached prefixes, and no filter `kvcache` finds them"
        yield error_at(("filters",), what, hint, absence=True)
    for index in off if weighing else ():
        what = f"kvcache is off, and {weighing[0]} weighs cached prefixes that nothing else finds"
        yield warning_at(("filters", index, "enabled"), what, "leave `enabled` out, or use policy least_request")


def _policies_by_facts(config: Config) -> list[str]:
    """Policies in use (clusters' own, silent ones, those that clients may ask for) that weigh what endpoints hold."""
    from kvproxy.cluster.feature import list_policies  # policies are loaded for a doubtful chain alone
    from kvproxy.cluster.routing.registry import policy_types

    used = [policy for cluster in config.clusters.values() for policy in list_policies(cluster)]
    weighing = {name for name, kind in policy_types().items() if kind.uses_overlap}
    return [policy.value for policy in dict.fromkeys(used) if policy in weighing]


def _without_parsing(config: Config, names: list[str]) -> Iterator[Finding]:
    if "kvcache" in names:
        yield error_at(("filters", names.index("kvcache")), "needs inference_request before it")
    for index, route in enumerate(config.routes):
        if route.model:
            yield error_at(
                ("routes", index, "model"), "needs the filter inference_request: nothing else reads the model"
            )


def _kvcache(settings: KvCacheSettings, at: Path, config: Config) -> Iterator[Finding]:
    if not settings.enabled:
        return
    url = settings.vllm_endpoint
    if fault := url_fault(url) if url else "":
        yield error_at((*at, "vllm_endpoint"), fault)


def _router(settings: RouterSettings, at: Path, config: Config) -> Iterator[Finding]:
    for index, path in enumerate(settings.paths):
        if path in ("all", "/"):
            why = "every path of every engine is public, also those that load adapters, clear caches or stop it"
            yield warning_at((*at, "paths"), why, "list the paths that clients need")
        elif not path.startswith("/"):
            yield error_at((*at, "paths", index), "must start with /")
    if settings.health_path and not settings.health_path.startswith("/"):
        yield error_at((*at, "health_path"), "must start with /")


_SETTINGS: dict[str, Callable[[Any, Path, Config], Iterator[Finding]]] = {
    "kvcache": _kvcache,
    "router": _router,
}


#: Policies that support the router queue.
FORECASTING = frozenset({PolicyName.KV_AWARE, PolicyName.LEAST_TTFT})
#: Keys that may hold clusters.
CLUSTERS_ARE_FROM: tuple[Path, ...] = (("clusters",), ("endpoints",), ("discovery",), ("policy",))


def _policies(cluster: ClusterSettings, at: Path) -> Iterator[Finding]:
    yield from find_missing_policy(cluster.policy, (*at, "policy"))
    for place, name in enumerate(cluster.client_policies):
        yield from find_missing_policy(name, (*at, "client_policies", place))


def find_missing_policy(name: PolicyName, at: Path) -> Iterator[Finding]:
    """Yield a fault if the policy is one of features, and none that is installed has it."""
    if name in OPTIONAL_POLICIES:
        from kvproxy.cluster.routing.registry import policy_types  # few configurations have to load policies

        if name not in policy_types():
            yield error_at(at, f"no installed feature has the policy {name}")


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
        yield from _verify_certificates(here, endpoint)
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
    listener = _listener_at(same_origin(endpoint.url), listeners)
    return f"this is the proxy's own address (`{listener}`): its requests would come back to it" if listener else ""


def _local(url: str) -> bool:
    return is_loopback(same_origin(url)[1])


def _verify_certificates(at: Path, settings: EndpointSettings) -> Iterator[Finding]:
    """Yield what is wrong with the files for connections to engines, if any are named."""
    if settings.ca_file or settings.cert_file or settings.key_file:
        from kvproxy.base.tls.files import ClientTls, verify_client_tls

        tls = ClientTls(settings.ca_file, cert_file=settings.cert_file, key_file=settings.key_file)
        yield from verify_client_tls(at, tls)


_EVERY = frozenset({"0.0.0.0", "::"})


def _listener_at(origin: tuple[str, str, int, str], listeners: Mapping[str, tuple[str, int]]) -> str:
    """Return the name of the listener (name: host and port) that answers at this origin, as `same_origin` gives it;
    else "".

    Names are not resolved, save for `localhost` and this machine's own.
    """
    _, host, port, _ = origin
    for name, (bound, own_port) in listeners.items():
        if own_port == port and _reaches(host, bound.casefold()):
            return name
    return ""


def _reaches(host: str, bound: str) -> bool:
    if bound in _EVERY:
        return _is_this_machine(host)
    if "localhost" in (host, bound):
        return is_loopback(host) and is_loopback(bound)
    return _canonical(host) == _canonical(bound)


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _is_this_machine(host: str) -> bool:
    if host in _EVERY or is_loopback(host) or host == socket.gethostname().casefold():
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this machine can be bound
    except (ValueError, OSError):
        return False
    return True
