"""May this process open as many connections as it is configured for?"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.doctor.finding import Finding, ok, warning
from kvproxy.doctor.site import Site

#: Log, event loop, probes, ZMQ sockets, libraries.
_OTHER_FILES = 128


@dataclass(frozen=True, slots=True)
class LimitsCheck:
    """Open files of this shell or service, which `kvproxy serve` inherits."""

    site: Site

    name = "open files"
    calls = 1
    where = "this host"

    async def find(self) -> Sequence[Finding]:
        config, site = self.site.config, self.site
        needed = config.limits.connections + len(site.engines) * config.pool.max_connections + _OTHER_FILES
        if site.kvcache is not None and site.kvcache.lmcache_endpoint:
            needed += 2 * site.kvcache.max_connections
        allowed = site.open_files
        if allowed in (resource.RLIM_INFINITY, -1) or allowed >= needed:
            return [ok(self.where, "open files suffice for every configured connection")]
        what = f"{allowed} open files are allowed, {needed} needed when every configured connection is in use"
        fix = (
            f"allow more (`ulimit -n {needed}`, systemd `LimitNOFILE={needed}`, container `--ulimit nofile={needed}`), "
            "or lower `limits.connections` and `pool.max_connections`"
        )
        return [warning(self.where, what, fix)]
