"""Follows the KV events of every engine that publishes them, into its cluster's precise index."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Self

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Sleep, utc_seconds
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.clients.event_sources import KvEventSource, stated_sources
from kvproxy.cache.engines import Engines
from kvproxy.cache.indexes.block_events import AllBlocksCleared, BlockStored, KvEvent
from kvproxy.cache.overlap.index_state import FollowedEvents
from kvproxy.cache.overlap.reports import EngineReports, ReportTrouble
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.settings import EventSources
from kvproxy.features.kv_events.reported_prompts import ReportedPrompts
from kvproxy.features.kv_events.status import StreamState, StreamStatus, index_worth
from kvproxy.features.kv_events.subscriber import KvEventSubscriber
from kvproxy.features.kv_events.zmtp import ReceiveMemory

log = logging.getLogger("kvproxy.kvcache")

#: Interval of checks for endpoints that came or left, and of queries to engines that did not answer.
LOOK_AGAIN_S = 2.0

#: Interval of queries to engines that publish nothing: one that was restarted may publish now.
ASK_AGAIN_S = 60.0

#: Queries at once.
MAX_CONNECTIONS = 4


_UNSTATED = EventSources()


class _Consumer:
    """Applies one cluster's events, and keeps which of its endpoints are followed exactly on every rank."""

    def __init__(self, followed: FollowedEvents) -> None:
        self._followed = followed
        self._reported = followed.reported = ReportedPrompts(followed.precise)
        self._states: dict[EndpointId, dict[int, StreamState]] = {}
        self._without_prefixes: set[tuple[EndpointId, int]] = set()  # ranks whose events have none

    def apply(self, endpoint: EndpointId, dp_rank: int, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                if event.lora_name:
                    self._followed.loras[event.lora_name] = None
                if event.pairs:
                    self._followed.paired.add(endpoint)
            elif isinstance(event, AllBlocksCleared) and self._is_live(endpoint, dp_rank):
                self._followed.on_cleared(endpoint)
        precise = self._followed.precise
        rank = (endpoint, dp_rank)
        precise.apply_events(endpoint, dp_rank, events)
        self._reported.events_came(endpoint)
        if precise.lacks_prefixes(endpoint, dp_rank) is not (rank in self._without_prefixes):
            self._without_prefixes ^= {rank}
            self._update_exact()

    def cleared(self, endpoint: EndpointId, dp_rank: int) -> None:
        self._followed.precise.clear_rank(endpoint, dp_rank)

    def state_changed(self, endpoint: EndpointId, dp_rank: int, status: StreamStatus) -> None:
        self._states.setdefault(endpoint, {})[dp_rank] = status.state
        self._update_exact()

    def forget(self, endpoint: EndpointId) -> None:
        """Its streams ended."""
        self._states.pop(endpoint, None)
        self._without_prefixes = {rank for rank in self._without_prefixes if rank[0] != endpoint}
        self._followed.precise.remove_endpoint(endpoint)
        self._followed.paired.discard(endpoint)
        self._update_exact()

    def _is_live(self, endpoint: EndpointId, dp_rank: int) -> bool:
        """Return True if events are live now: a new stream brings its history first."""
        return self._states.get(endpoint, {}).get(dp_rank) in (StreamState.EXACT, StreamState.DEGRADED)

    async def sweep(self) -> None:
        """Give up all that is kept of streams that ended, some at a time: the loop has other work."""
        while not self._followed.precise.sweep_rows():  # noqa: ASYNC110 - no event, only other tasks to let through
            await asyncio.sleep(0)

    def _update_exact(self) -> None:
        exact = {e for e, ranks in self._states.items() if all(one is StreamState.EXACT for one in ranks.values())}
        exact -= {endpoint for endpoint, _ in self._without_prefixes}
        self._followed.exact.intersection_update(exact)  # in place: the indexes hold the same set
        self._followed.exact.update(exact)


class EventStreams(BackgroundTask, EngineReports):
    """Owns one task that keeps a subscriber for each stream of each endpoint there is.

    `stated`: where engines without `/kv_event_sources` publish. An engine that publishes nothing is left alone, logged
    once (as a warning where events are `required` of all engines), and asked again every `ASK_AGAIN_S`. Engines are
    asked over connections of its own, so that it outlives the service it was made for: what it has `followed` can be
    had again only by having every engine repeat it.
    """

    task_name = "kvcache event streams"

    def __init__(
        self,
        *,
        clusters: Mapping[str, Cluster],
        timeout_s: float,
        metrics: Metrics,
        clock: Clock,
        stated: EventSources = _UNSTATED,
        required: bool = True,
        wall_clock: Clock = utc_seconds,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._clusters = clusters
        self._stated = stated
        self._required = required
        EngineReports.__init__(self, {name: FollowedEvents() for name in clusters})
        for followed in self.followed.values():
            followed.any = required
            followed.on_prefilled = self.note_traffic
        self._consumers = {name: _Consumer(followed) for name, followed in self.followed.items()}
        self._pool = UpstreamPool(max_connections=MAX_CONNECTIONS, max_idle=0, clock=clock)
        self._engines = Engines(self._pool, timeout_s=timeout_s)
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._streams: dict[Endpoint, tuple[str, AsyncExitStack, tuple[KvEventSubscriber, ...]]] = {}
        self._ask_at: dict[Endpoint, float] = {}  # of engines that publish nothing, or whose streams are in trouble
        self._replay_memory = ReceiveMemory()

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        async with self._pool, self._engines:  # these two end last
            await super().__aexit__(*exc_info)
            for endpoint in list(self._streams):
                await self._end(endpoint)
            for consumer in self._consumers.values():
                await consumer.sweep()

    def note_traffic(self, endpoint: Endpoint, uncached_tokens: int) -> None:
        """Note the engine's prefilled tokens: a stream that stays silent all the same is not trusted. Of several ranks
        behind one endpoint it is not known which one computed them."""
        entry = self._streams.get(endpoint)
        if entry is not None and len(entry[2]) == 1:
            entry[2][0].note_traffic(uncached_tokens)

    def streams(self, endpoint: Endpoint) -> dict[int, StreamStatus]:
        """State of each of its streams, by data-parallel rank; empty while it is not followed."""
        entry = self._streams.get(endpoint)
        return {} if entry is None else {one.source.dp_rank: one.status for one in entry[2]}

    def publishes(self, endpoint: Endpoint) -> bool | None:
        """Return whether the engine publishes KV events; None: it has not answered yet."""
        return True if endpoint in self._streams else False if endpoint in self._ask_at else None

    def describe(self, endpoint: Endpoint) -> Mapping[str, object]:
        """Return what an index fed by its streams is worth, and the state of each."""
        streams = self.streams(endpoint)
        rows = [{"rank": rank, "state": one.state.value, "reason": one.reason.value} for rank, one in streams.items()]
        return {"state": index_worth(streams).value, "streams": rows}

    def find_troubles(self) -> Iterator[ReportTrouble]:
        """Return the streams in trouble."""
        for endpoint, (cluster, _, subscribers) in self._streams.items():
            for one in subscribers:
                for_s = one.troubled_s
                if for_s is not None:
                    yield ReportTrouble(cluster, endpoint.id, one.source.dp_rank, one.status.reason.value, for_s)

    async def follow_endpoints(self) -> None:
        """Bring the subscribers up to date with the endpoints there are, and with the policies that weigh what they
        hold."""
        present = {
            endpoint: name
            for name, cluster in self._clusters.items()
            if self._required or cluster.policies.uses_overlap
            for endpoint in cluster.endpoints
        }
        self._ask_at = {endpoint: at for endpoint, at in self._ask_at.items() if endpoint in present}
        self._engines.keep_only(endpoint.engine for endpoint in present)
        for endpoint in self._streams.keys() - present.keys():
            await self._end(endpoint)
        silent: dict[str, list[str]] = {}
        at_once = asyncio.Semaphore(MAX_CONNECTIONS)
        async with asyncio.TaskGroup() as group:
            for endpoint, name in present.items():
                if self._is_due(endpoint):
                    group.create_task(self._ask(endpoint, name, silent, at_once))
        level = logging.WARNING if self._required else logging.INFO
        for why, endpoints in silent.items():
            log.log(level, "[kvcache] %s: %s; their indexes follow routed requests", ", ".join(endpoints), why)

    async def _run(self) -> None:
        while True:
            try:
                await self.follow_endpoints()
            except Exception:
                log.exception("[kvcache] KV event streams cannot be followed")
            await self._sleep(LOOK_AGAIN_S)

    def _is_due(self, endpoint: Endpoint) -> bool:
        """Return True if its engine is to be queried: it is not followed, or its streams have long been in trouble."""
        entry = self._streams.get(endpoint)
        if entry is not None and any((one.troubled_s or 0.0) < ASK_AGAIN_S for one in entry[2]):
            self._ask_at.pop(endpoint, None)
            return False
        return self._ask_at.get(endpoint, -math.inf) <= self._clock()

    async def _ask(
        self, endpoint: Endpoint, cluster: str, silent: dict[str, list[str]], at_once: asyncio.Semaphore
    ) -> None:
        """Follow the endpoint as its engine publishes now. Of one that was restarted and publishes elsewhere, or
        nothing, the streams end."""
        async with at_once:
            found = await self._find_sources(endpoint)
        entry = self._streams.get(endpoint)
        if entry is None:
            if found is not None:
                await self._begin(endpoint, cluster, *found, silent)
        elif found is None or found[0] == tuple(one.source for one in entry[2]):
            self._ask_at[endpoint] = self._clock() + ASK_AGAIN_S
        else:
            await self._end(endpoint)
            self._ask_at.pop(endpoint, None)

    async def _begin(
        self,
        endpoint: Endpoint,
        cluster: str,
        sources: tuple[KvEventSource, ...],
        why: str,
        silent: dict[str, list[str]],
    ) -> None:
        """Follow the endpoint; or note in `silent`, the first time, why it cannot be followed."""
        if not sources:
            if endpoint not in self._ask_at:
                silent.setdefault(why, []).append(str(endpoint.id))
            self._ask_at[endpoint] = self._clock() + ASK_AGAIN_S
            return
        self._ask_at.pop(endpoint, None)
        stack = AsyncExitStack()
        subscribers = tuple(
            KvEventSubscriber(
                endpoint.id,
                source,
                consumer=self._consumers[cluster],
                metrics=self._metrics,
                clock=self._clock,
                wall_clock=self._wall_clock,
                replay_memory=self._replay_memory,
            )
            for source in sources
        )
        for one in subscribers:
            await stack.enter_async_context(one)
        self._streams[endpoint] = (cluster, stack, subscribers)
        self.followed[cluster].any = True

    async def _find_sources(self, endpoint: Endpoint) -> tuple[tuple[KvEventSource, ...], str] | None:
        """Where the engine publishes, or the reason if it does not; None while it does not answer."""
        try:
            sources = await self._engines.client(endpoint.engine).kv_event_sources()
        except NotSupported:
            own = endpoint.kv_event_sources
            stated = own if own.endpoint else self._stated
            why = "no address of KV events is known (`kv_event_sources` can name one)"
            return stated_sources(stated, host=endpoint.origin.host, rank=endpoint.rank), why
        except ClientError as error:
            log.debug("[kvcache] KV event sources of %s: %s", endpoint.id, error)
            return None
        if endpoint.rank is not None:
            sources = tuple(one for one in sources if one.dp_rank == endpoint.rank)
        return sources, "no KV events are published"

    async def _end(self, endpoint: Endpoint) -> None:
        cluster, stack, _ = self._streams.pop(endpoint)
        await stack.aclose()
        self._consumers[cluster].forget(endpoint.id)
        if not self._required:
            self.followed[cluster].any = any(name == cluster for name, _, _ in self._streams.values())
