"""Reports of engines about their own caches: how a feature adds exact facts about endpoints, and how far they can be
trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.cache.overlap.index_state import FollowedEvents
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class ReportTrouble:
    """Reports of one rank that miss something, why, and for how long."""

    cluster: str
    endpoint: EndpointId
    dp_rank: int
    reason: str
    for_s: float


class EngineReports(AbstractAsyncContextManager["EngineReports"]):
    """Facts that the engines of some clusters report, by cluster, followed while it is entered. This one follows
    none."""

    def __init__(self, followed: Mapping[str, FollowedEvents]) -> None:
        self.followed = followed

    async def __aexit__(self, *_: object) -> None:
        """Follow no engine any more."""

    def describe(self, endpoint: Endpoint) -> Mapping[str, object]:
        """Return how far the facts about an endpoint can be trusted, for people."""
        return {"state": "approximate", "streams": []}

    def find_troubles(self) -> Iterable[ReportTrouble]:
        """Return the reports that miss something."""
        return ()


class ReportWatch(Protocol):
    """Observer of the reports of one engine while `kvproxy doctor` has it compute a few prompts."""

    @property
    def skew_s(self) -> float | None:
        """Offset of the engine's clock from ours, by its report about a prompt; None: not known."""
        ...

    async def connect(self, *, within_s: float) -> None:
        """Begin, before the first prompt."""
        ...

    async def find_prompt(self, tokens: Sequence[int], *, within_s: float) -> bool:
        """Wait for a report about this prompt; False: none came, and another prompt may bring one."""
        ...

    async def ask_rest(self, *, within_s: float) -> None:
        """Find out what no prompt shows."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class FollowsReports(Protocol):
    """Settings by which a feature follows reports. They are hashable: those of equal settings go on over a reload."""

    @property
    def required(self) -> bool:
        """True if every engine is expected to report; False: those that do are followed."""
        ...

    def __call__(self, clusters: Mapping[str, Cluster], *, metrics: Metrics, clock: Clock) -> EngineReports:
        """Return the reports of these clusters' engines, to be entered."""
        ...

    def watch(self, sources: Sequence[KvEventSource], *, clock: Clock, wall_clock: Clock) -> ReportWatch:
        """Return an observer of one engine, which reports there."""
        ...
