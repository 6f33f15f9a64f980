"""Which paths of the engines do clients reach?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.config.schema import Config, RouterSettings
from kvproxy.doctor.finding import Finding, ok
from kvproxy.forward.public import DEFAULT_PATHS, PublicPaths

_INFERENCE = "clients reach inference, the models and tokenizing"


@dataclass(frozen=True, slots=True)
class PublicCheck:
    """Says what `router.paths` and routes open; that every path is open is a warning of the configuration's own."""

    config: Config

    name = "public paths"
    calls = 1
    where = "public listener"

    async def find(self) -> Sequence[Finding]:
        settings = [spec.settings for spec in self.config.filters if isinstance(spec.settings, RouterSettings)]
        listed = settings[0].paths if settings else ()
        paths = PublicPaths(listed, prefixes=[route.prefix for route in self.config.routes])
        if "/sleep" in paths:
            return []
        further = sorted(paths.exact - set(DEFAULT_PATHS))
        text = f", and {', '.join(further[:8])}" if further else ""
        return [ok(self.where, f"{_INFERENCE}{text}; no other path of an engine")]
