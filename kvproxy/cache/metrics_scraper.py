"""Reads the engines' metrics, again and again, out of every request's path, and gives each reading to
all that learns of it: load, ranks, the size of an index, the trust in an engine that restarted or sleeps."""

from __future__ import annotations

import asyncio
import logging
import operator
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from math import lcm

from kvproxy.base.background_task import BackgroundTask, ask_each, in_slices
from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.errors import ClientError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Sleep
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.engines import Engines, RankFinder
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.cache.metrics import HoldingMetrics, TierMetrics
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cache.state import CacheState
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.routing.engine_samples import Reading
from kvproxy.cluster.routing.load import EngineState

log = logging.getLogger("kvproxy.kvcache")

#: The first round comes this long after the start: engines that just came up are busy enough.
FIRST_ROUND_S = 1.0
MAX_CONCURRENT = 16
#: A reading older than this many intervals (and a while) no longer counts.
_STALE_INTERVALS = 3
_STALE_S = 5.0
#: Engines that others may have read since the latest turn.
_MAX_HEARD = 4096
#: Rounds without a reading still forget endpoints that left and renew pins.
WITHOUT_READING_S = 5.0


class SharedReadings:
    """Readings shared by several processes: one at a time reads an engine and sends the result to the others, which
    skip their turn. Turns must not keep step, or each would read."""

    def __init__(self, *, clock: Clock, max_age_s: float) -> None:
        self.tell: Callable[[str, str, EngineMetrics], None] | None = None  # cluster, engine and its reading
        self._clock = clock
        self._max_age_s = max_age_s
        self._heard: BoundedMapping[tuple[str, str], tuple[float, EngineMetrics]] = BoundedMapping(_MAX_HEARD)

    def hear(self, cluster: str, engine: str, metrics: EngineMetrics) -> None:
        """Another process has read this engine just now."""
        self._heard[cluster, engine] = (self._clock(), metrics)

    def take(self, cluster: str, engine: str) -> EngineMetrics | None:
        """Return the reading received since the latest turn."""
        heard_at, metrics = self._heard.pop((cluster, engine), (0.0, None))
        return metrics if self._clock() - heard_at <= self._max_age_s else None


class EngineReadings:
    """Latest readings; one older than `max_age_s` no longer counts."""

    def __init__(self, *, clock: Clock, max_age_s: float) -> None:
        self.max_age_s = max_age_s
        self._clock = clock
        self._latest: dict[Endpoint, tuple[float, EngineMetrics]] = {}

    def note_scrape(self, endpoint: Endpoint, metrics: EngineMetrics) -> None:
        """Note a scrape of one engine."""
        self._latest[endpoint] = (self._clock(), metrics)

    def latest_scrape(self, endpoint: Endpoint) -> tuple[float, EngineMetrics] | None:
        """Age in seconds and content of the latest scrape; None before the first."""
        read_at, metrics = self._latest.get(endpoint, (0.0, None))
        return None if metrics is None else (self._clock() - read_at, metrics)

    def current_scrape(self, endpoint: Endpoint) -> EngineMetrics | None:
        """Return the latest scrape, if it is not too old."""
        latest = self.latest_scrape(endpoint)
        return latest[1] if latest is not None and latest[0] <= self.max_age_s else None

    def keep_only(self, endpoints: frozenset[Endpoint]) -> None:
        """Forget the readings of all others."""
        self._latest = {endpoint: reading for endpoint, reading in self._latest.items() if endpoint in endpoints}


class ReadingIntake:
    """Gives each reading to all that learns of it: `signals`, the ledgers, the `indexes` by cluster, and the state."""

    def __init__(
        self, state: CacheState, *, indexes: Mapping[str, LocalIndexes], signals: EngineReadings, clock: Clock
    ) -> None:
        self._signals = signals
        self._indexes = indexes
        self._bytes_per_token = state.bytes_per_token
        self._hit_ratios = state.hit_ratios
        self._losses = state.losses
        self._clock = clock

    def take(self, cluster: Cluster, engine: Engine, metrics: EngineMetrics) -> None:
        """Distribute an engine's reading to all that learn from it."""
        engine.adapters.use = metrics.lora
        restarted = False
        for endpoint in cluster.members.of_engine(engine):
            own = metrics if endpoint.rank is None else metrics.ranks.get(endpoint.rank)
            if own is not None:
                restarted |= self._observe(cluster, endpoint, own)
        if restarted:
            log.info("[kvcache] %s/%s is a new process: its index is cleared", cluster.name, engine.id)
            cluster.forget_process(engine)

    def _observe(self, cluster: Cluster, endpoint: Endpoint, metrics: EngineMetrics) -> bool:
        """Observe the reading of an engine, or of one rank; returns True for a new process."""
        latest = self._signals.latest_scrape(endpoint)
        self._signals.note_scrape(endpoint, metrics)
        if metrics.asleep is not endpoint.asleep:
            endpoint.asleep = metrics.asleep
            how = "sleeps: it is left out" if metrics.asleep else "is awake again"
            log.info("[kvcache] %s/%s %s", cluster.name, endpoint.id, how)
        if metrics.gave_up_cache and not (latest is not None and latest[1].gave_up_cache):
            self._gave_up(cluster.name, endpoint)
        capacity_tokens = None if metrics.cache is None else metrics.cache.capacity_tokens
        now = self._clock()
        endpoint.load.engine = EngineState(now, capacity_tokens, metrics.running, metrics.waiting)
        if metrics.prefills is not None and metrics.prefill_s is not None:
            endpoint.ended.read_counters(Reading(metrics.prefills, metrics.prefill_s, metrics.prefill_tokens), now)
        restarted = self._restarted(cluster.name, endpoint.id, metrics)
        if restarted:
            self._losses.note_loss(cluster.name, endpoint.id, LossReason.RESTARTED)
        self._size(cluster.name, endpoint, metrics)
        return restarted

    def forget_sleep(self, cluster: Cluster, engine: Engine) -> None:
        """Forget an old report of sleep, which must not exclude the engine any longer."""
        for endpoint in cluster.members.of_engine(engine):
            latest = self._signals.latest_scrape(endpoint)
            if latest is None or latest[0] > self._signals.max_age_s:
                endpoint.asleep = False

    def _gave_up(self, cluster: str, endpoint: Endpoint) -> None:
        """Its sleep is so deep that it gave its KV memory up."""
        self._indexes[cluster].forget_cache(endpoint.id)
        self._losses.note_loss(cluster, endpoint.id, LossReason.ASLEEP)

    def _restarted(self, cluster: str, endpoint: EndpointId, metrics: EngineMetrics) -> bool:
        """Return True if this is another process than before; without a start time its counters decide."""
        indexes = self._indexes[cluster]
        restarted = self._hit_ratios.read_counters((cluster, endpoint), metrics)
        if metrics.started_at is not None:
            return indexes.process_started(endpoint, metrics.started_at)
        if restarted:
            indexes.reset_endpoint(endpoint)
        return restarted

    def _size(self, cluster: str, endpoint: Endpoint, metrics: EngineMetrics) -> None:
        """Size the index of an endpoint by its engine's reported capacity, in blocks of its own size, unless evidence
        contradicts."""
        cache = metrics.cache
        indexes = self._indexes[cluster]
        block_tokens = None if cache is None else cache.block_tokens
        indexes.steps.tell_block_size(endpoint.id, lcm(block_tokens or 1, indexes.precise.step_tokens(endpoint.id)))
        if cache is None or not cache.capacity_tokens:
            return
        blocks = int(cache.capacity_tokens * self._bytes_per_token.typical) // TEXT_BLOCK_BYTES
        indexes.capacities.set_reported(endpoint.id, 0 if cache.prefix_caching is False else blocks)


class MetricsScraper(BackgroundTask):
    """Owns one task. Each round reads every engine (a few at a time), sizes its index, forgets endpoints that left, and
    calls `on_round`; with an interval of 0 no engine is read. `readings` may be shared with other processes."""

    task_name = "kvcache watch"

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        clusters: Mapping[str, Cluster],
        state: CacheState,
        indexes: Mapping[str, LocalIndexes],
        engines: Engines,
        read_store: Callable[[], Awaitable[None]],
        on_round: Callable[[], Awaitable[None]],
        clock: Clock,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._interval_s = settings.engine_metrics_interval
        self.readings = SharedReadings(clock=clock, max_age_s=self._interval_s)
        max_age_s = _STALE_INTERVALS * self._interval_s + _STALE_S
        self.signals = EngineReadings(clock=clock, max_age_s=max_age_s)
        self._intake = ReadingIntake(state, indexes=indexes, signals=self.signals, clock=clock)
        self._clusters = clusters
        self._indexes = indexes
        self._engines = engines
        self._rank_finder = RankFinder(engines, stated=settings.kv_event_sources)
        self._read_store = read_store
        self._hotness = state.hotness(settings)
        self._on_round = on_round
        self._clock = clock
        self._sleep = sleep
        self._present = state.present
        self._followed: Sequence[Sequence[Endpoint]] = ()  # members of the clusters at the last look

    def bind_gauges(self, metrics: Metrics) -> None:
        metrics.group(HoldingMetrics).engine_kv_usage.set_source(
            lambda: ((of, one.kv_usage) for of, one in self._readings() if one.kv_usage is not None)
        )
        metrics.group(HoldingMetrics).engine_requests.set_source(self._engine_requests)
        metrics.group(TierMetrics).cached.set_source(
            lambda: (((*of, place), n) for of, one in self._readings() for place, n in one.cached_from.items())
        )

    async def _run(self) -> None:
        interval_s = self._interval_s or WITHOUT_READING_S
        await self._sleep(min(FIRST_ROUND_S, interval_s))
        while True:
            try:
                await self.scrape_all(reading=self._interval_s > 0)
            except Exception:
                log.exception("[kvcache] a round of readings is broken")
            await self._sleep(interval_s if self.readings.tell is None else interval_s * random.uniform(0.9, 1.1))

    async def scrape_all(self, *, reading: bool = True) -> None:
        """Scrape every engine once; without `reading` no engine is queried."""
        self._follow()
        if reading:
            await self._read_all()
        await self._on_round()

    def hear(self, cluster: str, engine: str, metrics: EngineMetrics) -> None:
        """Another process has read this engine just now."""
        there = self._clusters.get(cluster)
        found = None if there is None else next((one for one in there.engines if str(one.id) == engine), None)
        if there is not None and found is not None:
            self.readings.hear(cluster, engine, metrics)
            self._intake.take(there, found, metrics)

    async def _read_all(self) -> None:
        engines = [(cluster, engine) for cluster in self._clusters.values() for engine in cluster.engines]
        reading = ask_each(engines, self._read, at_once=MAX_CONCURRENT)
        outcomes, stored = await asyncio.gather(reading, self._read_store(), return_exceptions=True)
        if isinstance(outcomes, BaseException):
            raise outcomes
        read = ["the store", *(f"{cluster.name}/{engine.id}" for cluster, engine in engines)]
        for name, outcome in zip(read, (stored, *outcomes), strict=True):
            if isinstance(outcome, Exception):  # the others are read all the same
                log.error("[kvcache] the reading of %s is broken", name, exc_info=outcome)
        for name, cluster in self._clusters.items():
            readings = [self.signals.latest_scrape(endpoint) async for endpoint in in_slices(cluster.endpoints)]
            self._indexes[name].prompts.note_kinds([reading[1].kind for reading in readings if reading is not None])

    def _follow(self) -> None:
        """Forget endpoints that left or are another engine now, if any did."""
        members = [cluster.endpoints for cluster in self._clusters.values()]
        if len(members) == len(self._followed) and all(map(operator.is_, members, self._followed)):
            return
        self._followed = members
        left: set[str] = set()
        for name, cluster in self._clusters.items():
            indexes = self._indexes[name]
            before = self._present.get(name, {})
            now = {str(endpoint.id): endpoint for endpoint in cluster.endpoints}
            for endpoint_id, endpoint in before.items():
                if endpoint_id not in now or now[endpoint_id].origin != endpoint.origin:
                    indexes.forget_endpoint(endpoint.id)
                    left.add(endpoint.instance_id)
            self._present[name] = now
            indexes.hot.endpoints = max(1, len(now))
        every = frozenset(endpoint for cluster in self._clusters.values() for endpoint in cluster.endpoints)
        for instance in left - {endpoint.instance_id for endpoint in every}:
            self._hotness.note_emptied(instance)
        self._engines.keep_only(endpoint.engine for endpoint in every)
        self.signals.keep_only(every)

    async def _read(self, of: tuple[Cluster, Engine]) -> None:
        cluster, engine = of
        heard = self.readings.take(cluster.name, str(engine.id))
        try:
            metrics = heard or await self._engines.client(engine).fetch_metrics()
            await self._rank_finder.follow_ranks(cluster, engine, metrics)
        except ClientError as error:
            log.debug("[kvcache] metrics of %s: %s", engine.id, error)
            self._intake.forget_sleep(cluster, engine)
            return
        if heard is None:
            self._intake.take(cluster, engine, metrics)
            if self.readings.tell is not None:
                self.readings.tell(cluster.name, str(engine.id), metrics)

    def _engine_requests(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield requests running and waiting at each engine."""
        for labels, metrics in self._readings():
            for state, count in (("running", metrics.running), ("waiting", metrics.waiting)):
                if count is not None:
                    yield (*labels, state), count

    def _readings(self) -> Iterator[tuple[tuple[str, str], EngineMetrics]]:
        """Yield what engines reported that is not too old."""
        for name, cluster in self._clusters.items():
            for endpoint in cluster.endpoints:
                if (metrics := self.signals.current_scrape(endpoint)) is not None:
                    yield (name, str(endpoint.id)), metrics
