"""Do all engines of a cluster run the same version?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.doctor.finding import Finding, ok, warning
from kvproxy.doctor.site import Site, known


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """One cluster's engines; those that do not tell are left out."""

    site: Site
    cluster: str

    name = "version"
    calls = 3

    @property
    def where(self) -> str:
        return f"cluster {self.cluster}"

    async def find(self) -> Sequence[Finding]:
        engines = dict(self.site.clusters())[self.cluster]
        versions = await known(engines, lambda engine: engine.version())
        told = {engine.endpoint.id: version for engine, version in versions.items()}
        if not told:
            return []
        if len(set(told.values())) == 1:
            return [ok(self.where, f"version {next(iter(told.values()))}")]
        listed = ", ".join(f"{name} {version}" for name, version in told.items())
        fix = "bring them to one version: block hashes, templates and KV events change between versions"
        return [warning(self.where, f"the engines' versions differ: {listed}", fix)]
