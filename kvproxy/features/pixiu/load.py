"""A whole Pixiu file into a checked `Config`: listener, metrics, shutdown; the rest is in the modules beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvproxy.base.errors import Problem
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Path, dotted_path
from kvproxy.features.pixiu.chain import translate_chain
from kvproxy.features.pixiu.clusters import translate_clusters
from kvproxy.features.pixiu.schema import ConnectionManager, PixiuFile, PixiuListener, Resources
from kvproxy.operate.config.native import decode_form
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.shorthand import Translation

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
