"""Does LMCache answer, and is it the service that the configuration says?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.config.kvcache_schema import Provider
from kvproxy.doctor.finding import Finding, ok, problem
from kvproxy.doctor.lmcache import LmCache
from kvproxy.errors import BadResponse, ClientError


@dataclass(frozen=True, slots=True)
class ServiceCheck:
    """Controller or coordinator."""

    lmcache: LmCache

    name = "lmcache"
    calls = 4

    @property
    def where(self) -> str:
        return self.lmcache.where

    async def find(self) -> Sequence[Finding]:
        if (await self.lmcache.link()).error is not None:
            return []
        try:
            kind = await self.lmcache.kind()
        except BadResponse:
            fix = "correct `lmcache_endpoint`: the controller's own port (9000), or the coordinator's (9300)"
            return [problem(self.where, "answers, but is neither LMCache's controller nor its coordinator", fix)]
        except ClientError as error:
            return [problem(self.where, f"connects, but does not answer: {error}", "restart it; read its log")]
        configured = self.lmcache.settings.provider
        if configured not in (Provider.AUTO, kind):
            fix = f"set `provider: {kind}` (or auto), or correct `lmcache_endpoint`"
            return [problem(self.where, f"is a {kind}, not the {configured} that `provider` says", fix)]
        return [ok(self.where, f"LMCache's {kind} answers")]
