"""Engines that answer browsers themselves (`--allowed-origins`): their CORS fields do not cover the proxy's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.operate.doctor.engine import EngineCheck
from kvproxy.operate.doctor.report import Finding, warning


@dataclass(frozen=True, slots=True)
class CorsCheck(EngineCheck):
    """A preflight, where no `cors` filter is configured."""

    name = "cors"
    calls = 2

    async def collect_findings(self) -> Sequence[Finding]:
        if not await self.engine.is_reachable():
            return []
        origins = await self.engine.allowed_origins()
        if not origins:
            return []
        what = (
            "answers browsers of other origins, and the proxy does not: pages cannot read its lists of models and its "
            "errors (401, 404, 429, 5xx)"
        )
        fix = "add the filter: `filters: {cors: {allow_origins: [...]}}`, and take `--allowed-origins` from the engine"
        return [warning(self.where, what, fix)]
