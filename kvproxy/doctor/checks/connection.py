"""Can it be connected to, and for how long will its certificate last?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvproxy.doctor.finding import Finding, ok, warning
from kvproxy.doctor.link import Link, failure
from kvproxy.types import Clock
from kvproxy.upstream.origin import Origin

#: A certificate that lasts less than this is worth a word.
_SOON_S = 14 * 86400.0


@dataclass(frozen=True, slots=True)
class ConnectionCheck:
    """One address: name, port, TLS."""

    where: str
    origin: Origin
    link: Callable[[], Awaitable[Link]]
    wall_clock: Clock

    name = "connection"
    calls = 2

    async def find(self) -> Sequence[Finding]:
        link = await self.link()
        if link.error is not None:
            return [failure(self.where, self.origin, link.error, connected=link.connected)]
        ends = link.certificate_ends
        left_s = None if ends is None else (ends - datetime.fromtimestamp(self.wall_clock(), UTC)).total_seconds()
        if left_s is not None and left_s < _SOON_S:
            what = (
                f"the certificate of {self.origin.host}:{self.origin.port} expires in {max(left_s, 0) / 86400:.1f} days"
            )
            return [warning(self.where, what, "renew the engine's certificate")]
        return [ok(self.where, f"reachable at {self.origin}")]
