"""The proxy's own side: its configuration, this process's limits, and what its listener shows."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvproxy.base.errors import Problem
from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.base.tls.files import read_expiry
from kvproxy.base.tls.watch import describe_expiry
from kvproxy.base.types import Clock
from kvproxy.cache.settings import MAX_CONNECTIONS
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.deployment import Deployment
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning
from kvproxy.proxy.filter_settings import RouterSettings
from kvproxy.proxy.forward.public import DEFAULT_PATHS, PublicPaths

_NAME = "configuration"
_HOST = "this host"
_PUBLIC = "public listener"
#: Log, event loop, probes, ZMQ sockets, libraries.
_OTHER_FILES = 128
_INFERENCE = "clients reach inference, the models and tokenizing"


@check(_NAME, calls=1, where="configuration")
async def check_configuration(problems: Sequence[Problem], undiscovered: Sequence[Finding] = ()) -> Sequence[Finding]:
    """Pass on what `kvproxy check` found."""
    found = [*convert_problems(problems), *undiscovered]
    return found or [ok("configuration", "no errors, no warnings")]


def convert_problems(problems: Sequence[Problem]) -> Iterator[Finding]:
    """Convert problems: errors become problems, warnings warnings; notes confirm intended settings."""
    for one in problems:
        where = ": ".join(part for part in (one.place, one.path) if part) or "configuration"
        if one.severity == "note":
            found = ok(where, one.message)
        else:
            make = problem if one.severity == "error" else warning
            found = make(where, one.message, one.hint)
        yield replace(found, check=_NAME)


@check("certificates", calls=1, where="certificates")
async def check_certificates(config: Config, wall_clock: Clock) -> Sequence[Finding]:
    """Time the proxy's own certificates last: those of its listeners, and those it shows engines."""
    """Return a warning for each that expires soon; nothing where there is none."""
    files = list(_list_files(config))
    ends = await asyncio.to_thread(lambda: [(place, read_expiry(path)) for place, path in files])
    now = wall_clock()
    expiring = [describe_expiry(place, end - now) for place, end in ends if end is not None]
    found = [warning(one.place, one.what, one.fix) for one in expiring if one is not None]
    return found or ([ok("certificates", "last for 14 days or longer")] if files else [])


def _list_files(config: Config) -> Iterator[tuple[str, str]]:
    if config.listen.tls is not None:
        yield "listen.tls.certificate", config.listen.tls.certificate
    for feature in settings_of_features():
        yield from feature.list_certificates(config)
    for cluster, settings in config.clusters.items():
        for endpoint in settings.endpoints:
            if endpoint.cert_file:
                yield f"{cluster}/{endpoint.id} cert_file", endpoint.cert_file


@check("open files", calls=1, where=_HOST)
async def check_open_files(deployment: Deployment) -> Sequence[Finding]:
    """Open files of this shell or service, which `kvproxy serve` inherits."""
    config = deployment.config
    needed = config.limits.connections + len(deployment.engines) * config.pool.max_connections + _OTHER_FILES
    if deployment.looks_up:
        needed += 2 * MAX_CONNECTIONS
    allowed = deployment.open_files
    if allowed in (resource.RLIM_INFINITY, -1) or allowed >= needed:
        return [ok(_HOST, "open files suffice for every configured connection")]
    what = f"{allowed} open files are allowed, {needed} needed when every configured connection is in use"
    fix = (
        f"allow more (`ulimit -n {needed}`, systemd `LimitNOFILE={needed}`, container `--ulimit nofile={needed}`), "
        "or lower `limits.connections` and `pool.max_connections`"
    )
    return [warning(_HOST, what, fix)]


@check("public paths", calls=1, where=_PUBLIC)
async def check_public_paths(config: Config) -> Sequence[Finding]:
    """List the paths opened by `router.paths` and routes; that every path is open is a warning of the configuration's
    own."""
    settings = [spec.settings for spec in config.filters if isinstance(spec.settings, RouterSettings)]
    listed = settings[0].paths if settings else ()
    paths = PublicPaths(listed, prefixes=[route.prefix for route in config.routes])
    if "/sleep" in paths:
        return []
    further = sorted(paths.exact - set(DEFAULT_PATHS))
    text = f", and {', '.join(further[:8])}" if further else ""
    return [ok(_PUBLIC, f"{_INFERENCE}{text}; no other path of an engine")]
