"""Data of one cluster's indexes: from routing, kept over a reload, and from KV events, kept with their streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.feedback.reuse_step import ReuseSteps
from kvproxy.cache.feedback.trust import MissedReuses, Trust
from kvproxy.cache.indexes.approximate import ApproximateIndex
from kvproxy.cache.indexes.capacity import Capacities
from kvproxy.cache.indexes.endpoint_lru import SpeculativeEntry
from kvproxy.cache.indexes.heat import Heat, Run
from kvproxy.cache.indexes.precise import PreciseIndex
from kvproxy.cache.indexes.radix import PrefixCursor
from kvproxy.cache.overlap.last_served import LastServed
from kvproxy.cache.overlap.media_reports import MediaReports
from kvproxy.cache.prefix.session_hashes import SessionHashes
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import OverlapFacts

#: Blocks of text an endpoint is assumed to hold until its engine reports its capacity (64 MiB of prompts).
DEFAULT_CAPACITY_BLOCKS = 262_144
#: LoRA adapters distinguished from base models.
MAX_LORAS = 1024


class FollowedEvents:
    """Data from KV events of one cluster; it lives as long as the streams that feed it."""

    def __init__(self) -> None:
        self.precise = PreciseIndex()
        self.reported = MediaReports()
        self.exact: set[EndpointId] = set()  # endpoints with complete event streams
        self.loras: BoundedMapping[str, None] = BoundedMapping(MAX_LORAS)  # adapters that events spoke of
        self.paired: set[EndpointId] = set()  # endpoints whose events name pairs of tokens
        self.any = True  # whether an engine of the cluster publishes; until one does, no data is kept for its events
        #: Called with an endpoint whose live events report a dropped cache.
        self.on_cleared: Callable[[EndpointId], None] = lambda endpoint: None
        #: Called with an endpoint and the tokens, in whole blocks, that it computed of a prompt: it should report them.
        self.on_prefilled: Callable[[Endpoint, int], None] | None = None


class IndexWatch(Protocol):
    """Observer of one cluster's indexes, called in the order of their changes."""

    def routed(self, entry: SpeculativeEntry, facts: OverlapFacts) -> None: ...

    def moved(self, entry: SpeculativeEntry, *, kept: bool) -> None: ...

    def reused(self, entry: SpeculativeEntry, blocks: int) -> None: ...

    def contradicted(self, endpoint: EndpointId, cursor: PrefixCursor[Run], blocks: int) -> None: ...

    def settled(
        self, entry: SpeculativeEntry, *, prefilled: bool, lost: bool, ends: bool, calls_tool: bool
    ) -> None: ...

    def entered(self, endpoint: EndpointId, cursor: PrefixCursor[Run]) -> None: ...

    def process_started(self, endpoint: EndpointId, started_at: float) -> None: ...


class IndexState:
    """Data from routing and responses in one cluster; it outlives a reload."""

    def __init__(self, *, endpoints: int = 1, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self.hot = Heat(endpoints=endpoints)
        self.approximate = ApproximateIndex(capacity_blocks=capacity_blocks, heat=self.hot)
        self.capacities = Capacities(self.approximate)
        self.trust = Trust()  # in claims of KV events
        self.lookup_trust = Trust()  # in claims of LMCache
        self.missed = MissedReuses()  # by complete KV events
        self.steps = ReuseSteps()
        self.started_at: dict[EndpointId, float] = {}  # when each engine's process began, by its own clock
        self.sessions = SessionHashes()
        self.drops_header = True  # the engines leave a billing header out of prompts; not so where all are SGLang
        self.last_served = LastServed()
        self.watch: IndexWatch | None = None
