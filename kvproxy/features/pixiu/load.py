"""A whole Pixiu file into a checked `Config`: listener, metrics, shutdown, clusters; the rest is in modules beside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvproxy.base.errors import Problem
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Path, dotted_path
from kvproxy.cluster.settings import PolicyName
from kvproxy.features.pixiu.chain import translate_chain
from kvproxy.features.pixiu.schema import (
    ConnectionManager,
    LlmMeta,
    PixiuCluster,
    PixiuEndpoint,
    PixiuFile,
    PixiuListener,
    Resources,
    RetrySettings,
)
from kvproxy.operate.config.load import decode_form
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.shorthand import Translation

_MAX_ATTEMPTS = 20
_DEFAULT_TIMES = 2

#: Pixiu's policies by meaning; letters only, so that every spelling is accepted.
_POLICIES = {
    "": PolicyName.RANDOM,
    "rand": PolicyName.RANDOM,
    "weightrandom": PolicyName.RANDOM,
    "weightedrandom": PolicyName.RANDOM,
    "ringhashing": PolicyName.CONSISTENT_HASH,
    "ringhash": PolicyName.CONSISTENT_HASH,
    "maglevhashing": PolicyName.CONSISTENT_HASH,
    "maglev": PolicyName.CONSISTENT_HASH,
    **{name.value.replace("_", ""): name for name in PolicyName},
}


def translate_clusters(translation: Translation, clusters: Sequence[PixiuCluster], at: Path, *, scheme: str) -> None:
    """Every cluster, and the attempts a request needs to go through all of an endpoint list."""
    attempts = 0
    native: dict[str, Any] = translation.form.data.setdefault("clusters", {})
    for index, cluster in enumerate(clusters):
        here: Path = (*at, index)
        if cluster.name in native:
            translation.add_error((*here, "name"), f"two clusters are named {cluster.name!r}")
        translation.form.origins.add_move(("clusters", cluster.name), here)
        native[cluster.name] = _cluster(translation, cluster, here, scheme=scheme)
        endpoints = native[cluster.name]["endpoints"]
        attempts = max(attempts, sum(endpoint.get("retry", {}).get("attempts", 1) for endpoint in endpoints))
    if any(endpoint.llm_meta is not None for cluster in clusters for endpoint in cluster.endpoints):
        translation.set_value("retry", "attempts", min(max(attempts, 1), _MAX_ATTEMPTS), at)


def _cluster(translation: Translation, cluster: PixiuCluster, at: Path, *, scheme: str) -> dict[str, Any]:
    endpoints = []
    for index, endpoint in enumerate(cluster.endpoints):
        here: Path = (*at, "endpoints", index)
        translation.form.origins.add_move(
            ("clusters", cluster.name, "endpoints", index, "url"), (*here, "socket_address")
        )
        endpoints.append(_endpoint(translation, endpoint, here, scheme=scheme))
    if any(endpoint.llm_meta is None for endpoint in cluster.endpoints):
        translation.add_note((*at, "endpoints"), "without llm_meta a failed request is tried at another endpoint")
    if cluster.type.casefold() != "static":
        translation.add_note((*at, "type"), "endpoints are taken as listed; names are resolved at every new connection")
    if cluster.consistent is not None:
        translation.add_note((*at, "consistent"), "ring sizes have no counterpart: the hash here needs none")
    return {
        "policy": _policy(translation, cluster.lb_policy, (*at, "lb_policy")),
        "endpoints": endpoints,
        "health": {**_probing(translation, cluster, at), **_cooldown(translation, cluster, at)},
    }


def _policy(translation: Translation, written: str, at: Path) -> str:
    letters = re.sub(r"[^a-z]", "", written.casefold())
    policy = _POLICIES.get(letters)
    if policy is None:
        translation.add_warning(
            at, f"unknown policy {written!r}: random, as Pixiu does", f"known: {', '.join(PolicyName)}"
        )
        return PolicyName.RANDOM
    if letters in ("maglevhashing", "maglev"):
        translation.add_note(
            at, "consistent hashing with bounded load instead of Maglev's table; the same prompts stick"
        )
    return policy


def _probing(translation: Translation, cluster: PixiuCluster, at: Path) -> dict[str, Any]:
    """Without health_checks Pixiu probes nothing: the endpoints may have no /health."""
    if not cluster.health_checks:
        return {"active": False}
    check = cluster.health_checks[0]
    if check.protocol.casefold() not in ("http", "https"):
        translation.add_note(
            (*at, "health_checks", 0, "protocol"),
            "probed with GET /health: an open port reveals little about an engine",
        )
    if len(cluster.health_checks) > 1:
        translation.add_note((*at, "health_checks"), "only the first is used")
    return {
        "active": True,
        "timeout": check.timeout,
        "interval": check.interval,
        "healthy_threshold": check.healthy_threshold,
        "unhealthy_threshold": check.unhealthy_threshold,
    }


def _cooldown(translation: Translation, cluster: PixiuCluster, at: Path) -> dict[str, Any]:
    """`health_check_interval` is how long Pixiu leaves a failed endpoint alone."""
    metas = [(index, endpoint.llm_meta) for index, endpoint in enumerate(cluster.endpoints)]
    given = [(index, meta.health_check_interval) for index, meta in metas if meta and meta.health_check_interval]
    if not given:
        return {}
    longest_ms = max(interval for _, interval in given)
    translation.add_note(
        (*at, "endpoints", given[0][0], "llm_meta", "health_check_interval"),
        f"the cluster's endpoints are ejected for {longest_ms} ms after a failure (longer when they keep failing); "
        "client errors (4xx) and cancelled requests never eject",
    )
    return {"eject_after": 1, "eject_for": longest_ms / 1000}


def _endpoint(translation: Translation, endpoint: PixiuEndpoint, at: Path, *, scheme: str) -> dict[str, Any]:
    authority = _authority(translation, endpoint, (*at, "socket_address"))
    labels = {key: value for key, value in endpoint.meta.items() if key != "weight"}
    native: dict[str, Any] = {
        "id": endpoint.id or endpoint.upper_id or endpoint.name or re.sub(r"[\[\]]", "", authority),
        "url": f"{scheme}://{authority}",
    }
    if "weight" in endpoint.meta:
        native["weight"] = endpoint.meta["weight"]
    if endpoint.name:
        labels["name"] = endpoint.name
    meta = endpoint.llm_meta
    if meta is not None:
        native["retry"] = _retry(translation, meta, (*at, "llm_meta", "retry_policy"))
        if meta.api_key is not None:
            native["api_key"] = meta.api_key
        if meta.provider:
            labels["provider"] = meta.provider
    return {**native, "labels": labels} if labels else native


def _authority(translation: Translation, endpoint: PixiuEndpoint, at: Path) -> str:
    socket = endpoint.socket_address
    if len(socket.domains) > 1:
        translation.add_note((*at, "domains"), "only the first is used")
    host = socket.domains[0] if socket.domains else socket.address
    if not host:
        translation.add_error((*at, "address"), "an address or a domain is required")
    if not socket.domains and socket.port is None:
        translation.add_error((*at, "port"), "required with an address")
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") and not socket.domains else host
    return f"{bracketed}:{socket.port}" if socket.port else bracketed


def _retry(translation: Translation, meta: LlmMeta, at: Path) -> dict[str, Any]:
    policy = meta.retry_policy
    numbers: RetrySettings = policy.config or policy
    times = numbers.times if numbers.times is not None else policy.times
    retries = 0 if policy.name == "NoRetry" else (_DEFAULT_TIMES if times is None else times)
    if retries >= _MAX_ATTEMPTS:
        translation.add_note(at, f"at most {_MAX_ATTEMPTS} attempts are made at one endpoint")
    native: dict[str, Any] = {"attempts": min(retries + 1, _MAX_ATTEMPTS), "fallback": meta.fallback}
    if policy.name == "ExponentialBackoff":
        native |= {"backoff": numbers.initial, "max_backoff": numbers.longest, "multiplier": numbers.multiplier}
    elif policy.name == "CountBased":
        native |= {"backoff": 0.0, "max_backoff": 0.0, "multiplier": 1.0}
    return native


_MANAGER = "dgp.filter.httpconnectionmanager"


def decode_pixiu(
    raw: Mapping[str, Any],
    *,
    extra_filters: Mapping[str, type[Model] | None],
    lenient: bool,
    known: Sequence[Problem] = (),
) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, best effort if there are errors, with errors, warnings and notes; `known` ones come
    first."""
    translation = Translation(lenient=lenient)
    translation.form.begin_with(known)
    file = translation.decode_part(PixiuFile, raw, ())
    if file is None:
        return None, translation.form.problems
    resources, at = (file.static_resources, ("static_resources",)) if file.static_resources else (file, ())
    _unsupported(translation, file, resources, at)
    _metric(translation, file)
    if resources.shutdown_config is not None:
        translation.set_value(
            "shutdown", "drain", resources.shutdown_config.timeout, (*at, "shutdown_config", "timeout")
        )
        translation.add_note(
            (*at, "shutdown_config"),
            "step_timeout and reject_policy have no counterpart: new requests are refused at once, running ones "
            "have the whole timeout to finish",
        )
    scheme = _listeners(translation, resources, at)
    translate_clusters(translation, resources.clusters, (*at, "clusters"), scheme=scheme)
    config, problems = decode_form(translation.form, extra_filters=extra_filters)
    return config, [_in_this_dialect(problem, at) for problem in problems]


def _in_this_dialect(problem: Problem, at: Path) -> Problem:
    """Where clusters are missing, how this kind of file has them."""
    if problem.path != "clusters" or problem.severity != "error":
        return problem
    hint = "list them here, each with `name` and `endpoints` with a `socket_address`"
    return replace(problem, path=dotted_path((*at, "clusters")), hint=hint)


def _unsupported(translation: Translation, file: PixiuFile, resources: Resources, at: Path) -> None:
    if file.dynamic_resources is not None:
        translation.add_unsupported(("dynamic_resources",), "dynamic resources are not supported", "list the clusters")
    if resources.adapters is not None:
        translation.add_unsupported((*at, "adapters"), "adapters (registries) are not supported", "list the endpoints")
    if resources.pprof is not None:
        translation.add_note((*at, "pprofConf"), "ignored: there is no Go profiler here")
    if file.node is not None:
        translation.add_note(("node",), "ignored: it only names Pixiu to its control plane")


def _metric(translation: Translation, file: PixiuFile) -> None:
    if file.metric is None:
        return
    if not file.metric.enable:
        translation.set_value("admin", "enabled", False, ("metric", "enable"))
        return
    translation.set_value("admin", "port", file.metric.prometheus_port, ("metric", "prometheus_port"))
    translation.add_note(
        ("metric", "prometheus_port"),
        "metrics are served on loopback only, beside health and status; the native `admin` opens them with a token",
    )


def _listeners(translation: Translation, resources: Resources, at: Path) -> str:
    """Return the first listener and its chain; the scheme its proxy filter speaks to endpoints."""
    if not resources.listeners:
        translation.add_error((*at, "listeners"), "a listener is required")
        return "http"
    for index in range(1, len(resources.listeners)):
        translation.add_unsupported((*at, "listeners", index), "only one listener is supported")
    here: Path = (*at, "listeners", 0)
    listener = resources.listeners[0]
    if listener.protocol_type.upper() != "HTTP":
        translation.add_unsupported(
            (*here, "protocol_type"), "only HTTP listeners are supported", "the native `listen.tls` serves https"
        )
    _address(translation, listener, here)
    filters_at: Path = (*here, "filter_chains", "filters")
    managers: list[tuple[ConnectionManager, Path]] = []
    for index, item in enumerate(listener.filter_chains.filters):
        if item.name == _MANAGER and not managers:
            manager_at: Path = (*filters_at, index, "config")
            manager = translation.decode_part(ConnectionManager, item.config, manager_at)
            managers.append((manager or ConnectionManager(), manager_at))
        else:
            translation.add_unsupported(
                (*filters_at, index, "name"), "not the one HTTP filter chain", f"known: {_MANAGER}"
            )
    if not managers:
        translation.add_error(filters_at, f"no {_MANAGER}")
        return "http"
    return translate_chain(translation, *managers[0], has_clusters=bool(resources.clusters))


def _address(translation: Translation, listener: PixiuListener, here: Path) -> None:
    socket = listener.address.socket_address
    at = (*here, "address", "socket_address")
    translation.set_value("listen", "host", socket.address or "0.0.0.0", (*at, "address"))
    if socket.port is None:
        translation.add_error((*at, "port"), "required")
    else:
        translation.set_value("listen", "port", socket.port, (*at, "port"))
    if listener.config is not None:
        if listener.config.read_timeout:
            translation.set_value(
                "limits", "body_timeout", listener.config.read_timeout, (*here, "config", "read_timeout")
            )
        translation.add_note(
            (*here, "config"),
            "write_timeout and idle_timeout are not applied: they would cut long streams; read_timeout bounds bodies",
        )
