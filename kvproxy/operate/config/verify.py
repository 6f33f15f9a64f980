"""Checks across a decoded configuration: what each part allows alone but the whole does not."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.installed import installed
from kvproxy.base.settings.addresses import is_loopback
from kvproxy.base.settings.paths import Finding, Path, closest_word, error_at, warning_at
from kvproxy.base.tls.verify import verify_server_tls
from kvproxy.cluster.settings import RouteSettings
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.verify_clusters import CLUSTERS_ARE_FROM, find_cluster_faults
from kvproxy.operate.config.verify_filters import find_chain_faults
from kvproxy.operate.feature import Feature


def find_faults(config: Config) -> list[Finding]:
    """Everything wrong (or doubtful: severity `warning`) with the configuration as a whole."""
    checks = (_listeners, _tls, _limits, find_cluster_faults, _routes, _intervals, find_chain_faults)
    found = [finding for check in checks for finding in check(config)]
    return found + [finding for feature in installed(Feature) for finding in feature.verify(config)]


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
    if config.retry.max_backoff < config.retry.backoff:
        yield error_at(("retry", "max_backoff"), "shorter than backoff")
    if config.pool.max_idle > config.pool.max_connections:
        yield warning_at(("pool", "max_idle"), "more than max_connections are never kept")
    for name in ("connect", "first_byte", "idle"):
        if getattr(config.timeouts, name) == 0:
            yield error_at(("timeouts", name), "must be longer than 0")
    for name, cluster in config.clusters.items():
        health = cluster.health
        at = ("clusters", name, "health")
        if health.max_eject_for < health.eject_for:
            yield error_at((*at, "max_eject_for"), "shorter than eject_for")
        if health.active and (health.interval == 0 or health.timeout == 0):
            yield error_at((*at, "timeout" if health.interval else "interval"), "must be longer than 0")
        if not health.path.startswith("/"):
            yield error_at((*at, "path"), "must start with /")
