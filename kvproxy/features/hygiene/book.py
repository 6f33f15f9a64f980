"""Breaks since the start: sums by cause, client and tenant, and the latest ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint_metrics import OTHER
from kvproxy.features.hygiene.causes import ADVICE, Cause
from kvproxy.features.hygiene.note import PrefixBreak
from kvproxy.features.hygiene.threads import Sessions

#: Rows and breaks that are kept for people. Tenants are those of the configuration; beyond the bound they share a row.
MAX_ROWS = 512
MAX_LATEST = 100

Place = tuple[str, EndpointId]


@dataclass(slots=True)
class BreakTotals:
    """Of one cause, client and tenant."""

    breaks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    part: str = ""  # of the latest
    request_id: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class RecentBreak:
    """One of the latest."""

    at: float
    request_id: str
    cluster: str
    client: str
    tenant: str
    found: PrefixBreak


class BreakBook:
    """State of sessions and their breaks. It is bounded, and outlives a reload."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.returned = 0  # turns that were compared with the one before
        self.latest: deque[RecentBreak] = deque(maxlen=MAX_LATEST)
        self.reusing: set[Place] = set()  # engines that ever reused anything
        self.dropping: set[Place] = set()  # engines that reused a prompt whose header had changed
        self._totals: dict[tuple[Cause, str, str], BreakTotals] = {}

    @property
    def totals(self) -> list[tuple[tuple[Cause, str, str], BreakTotals]]:
        """By cause, client and tenant, the dearest first."""
        return sorted(self._totals.items(), key=lambda row: -row[1].tokens)

    def add(self, one: RecentBreak) -> None:
        """Count a break."""
        found = one.found
        key = (Cause(found.cause), one.client, one.tenant)
        if key not in self._totals and len(self._totals) >= MAX_ROWS:
            key = (*key[:2], OTHER)
        totals = self._totals.setdefault(key, BreakTotals())
        totals.breaks += 1
        totals.tokens += found.tokens
        totals.seconds += found.seconds or 0.0
        totals.part = found.part
        totals.request_id = one.request_id
        totals.at = one.at
        self.latest.append(one)

    def keep_only(self, present: Collection[Place]) -> None:
        """Forget all endpoints but these."""
        self.reusing.intersection_update(present)
        self.dropping.intersection_update(present)

    def describe(self, now: float) -> dict[str, object]:
        """Return the answer of `/cache/breaks`: the dearest cause first, and the latest breaks."""
        return {
            "returned": self.returned,
            "sessions": len(self.sessions),
            "causes": self.describe_causes(now),
            "latest": [
                {
                    "ago_s": now - one.at,
                    "request_id": one.request_id,
                    "cluster": one.cluster,
                    "client": one.client,
                    "tenant": one.tenant,
                    "cause": one.found.cause,
                    "part": one.found.part,
                    "tokens": one.found.tokens,
                    "seconds": one.found.seconds,
                }
                for one in reversed(self.latest)
            ],
        }

    def describe_causes(self, now: float) -> list[dict[str, object]]:
        """Return its rows, the dearest first."""
        return [
            {
                "cause": cause.value,
                "client": client,
                "tenant": tenant,
                "breaks": row.breaks,
                "tokens": row.tokens,
                "seconds": row.seconds,
                "part": row.part,
                "request_id": row.request_id,
                "ago_s": now - row.at,
                "what": ADVICE[cause][0],
                "fix": ADVICE[cause][1],
            }
            for (cause, client, tenant), row in self.totals
        ]
