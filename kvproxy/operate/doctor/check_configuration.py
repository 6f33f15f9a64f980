"""The proxy's own side: its configuration, this process's limits, and what its listener shows."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvproxy.base.errors import Problem
from kvproxy.base.installed import installed
from kvproxy.base.tls.files import read_expiry
from kvproxy.base.tls.watch import describe_expiry
from kvproxy.base.types import Clock
from kvproxy.cache.settings import MAX_CONNECTIONS
from kvproxy.operate.config.schema import Config
from kvproxy.operate.doctor.deployment import Deployment
from kvproxy.operate.doctor.report import Finding, ok, problem, warning
from kvproxy.operate.feature import Feature
from kvproxy.proxy.filter_settings import RouterSettings
from kvproxy.proxy.forward.public import DEFAULT_PATHS, PublicPaths

_NAME = "configuration"
#: Log, event loop, probes, ZMQ sockets, libraries.
_OTHER_FILES = 128
_INFERENCE = "clients reach inference, the models and tokenizing"


@dataclass(frozen=True, slots=True)
class ConfigurationCheck:
    """Passes on what `kvproxy check` found."""

    problems: Sequence[Problem]
    undiscovered: Sequence[Finding] = ()

    name = _NAME
    calls = 1
    where = "configuration"

    async def collect_findings(self) -> Sequence[Finding]:
        found = [*convert_problems(self.problems), *self.undiscovered]
        return found or [ok(self.where, "no errors, no warnings")]


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


@dataclass(frozen=True, slots=True)
class CertificatesCheck:
    """Time the proxy's own certificates last: those of its listeners, and those it shows engines."""

    config: Config
    wall_clock: Clock

    name = "certificates"
    calls = 1
    where = "certificates"

    async def collect_findings(self) -> Sequence[Finding]:
        """Return a warning for each that expires soon; nothing where there is none."""
        files = list(self._list_files())
        ends = await asyncio.to_thread(lambda: [(place, read_expiry(path)) for place, path in files])
        now = self.wall_clock()
        expiring = [describe_expiry(place, end - now) for place, end in ends if end is not None]
        found = [warning(one.place, one.what, one.fix) for one in expiring if one is not None]
        return found or ([ok(self.where, "last for 14 days or longer")] if files else [])

    def _list_files(self) -> Iterator[tuple[str, str]]:
        config = self.config
        if config.listen.tls is not None:
            yield "listen.tls.certificate", config.listen.tls.certificate
        for feature in installed(Feature):
            yield from feature.list_certificates(config)
        for cluster, settings in config.clusters.items():
            for endpoint in settings.endpoints:
                if endpoint.cert_file:
                    yield f"{cluster}/{endpoint.id} cert_file", endpoint.cert_file


@dataclass(frozen=True, slots=True)
class LimitsCheck:
    """Open files of this shell or service, which `kvproxy serve` inherits."""

    deployment: Deployment

    name = "open files"
    calls = 1
    where = "this host"

    async def collect_findings(self) -> Sequence[Finding]:
        config = self.deployment.config
        deployment = self.deployment
        needed = config.limits.connections + len(deployment.engines) * config.pool.max_connections + _OTHER_FILES
        if deployment.kvcache is not None and deployment.kvcache.lmcache_endpoint:
            needed += 2 * MAX_CONNECTIONS
        allowed = deployment.open_files
        if allowed in (resource.RLIM_INFINITY, -1) or allowed >= needed:
            return [ok(self.where, "open files suffice for every configured connection")]
        what = f"{allowed} open files are allowed, {needed} needed when every configured connection is in use"
        fix = (
            f"allow more (`ulimit -n {needed}`, systemd `LimitNOFILE={needed}`, container `--ulimit nofile={needed}`), "
            "or lower `limits.connections` and `pool.max_connections`"
        )
        return [warning(self.where, what, fix)]


@dataclass(frozen=True, slots=True)
class PublicCheck:
    """Lists the paths opened by `router.paths` and routes; that every path is open is a warning of the configuration's
    own."""

    config: Config

    name = "public paths"
    calls = 1
    where = "public listener"

    async def collect_findings(self) -> Sequence[Finding]:
        settings = [spec.settings for spec in self.config.filters if isinstance(spec.settings, RouterSettings)]
        listed = settings[0].paths if settings else ()
        paths = PublicPaths(listed, prefixes=[route.prefix for route in self.config.routes])
        if "/sleep" in paths:
            return []
        further = sorted(paths.exact - set(DEFAULT_PATHS))
        text = f", and {', '.join(further[:8])}" if further else ""
        return [ok(self.where, f"{_INFERENCE}{text}; no other path of an engine")]
