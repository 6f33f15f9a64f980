"""Calls that wake or start engines and put them to sleep: one at a time for each engine, and for each cluster."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import ClientError, DiscoveryError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.metrics_scraper import EngineReadings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.feature import list_wake_calls
from kvproxy.features.engine_sleep.metrics import SleepMetrics
from kvproxy.features.engine_sleep.settings import SleepPlace
from kvproxy.proxy.request.error_reply import LocalReply

log = logging.getLogger("kvproxy.sleep")

WAKE_UP = "/wake_up"
#: Level 1 keeps the weights in host memory; older versions ignore `mode` and abort what runs.
SLEEP = "/sleep?level=1&mode=wait"
#: Until a call counts as failed: weights of many gigabytes take minutes from disk.
CALL_S = 600.0
#: An engine that could not be woken is left alone for this long.
FAILED_S = 10.0
#: Requests held at once; further ones are refused.
MAX_HELD = 1024
#: How often a cluster whose engines are being started is looked at.
LOOK_S = 0.2
#: Readings in a row that show requests waiting in all engines that are awake, before one more is woken.
CROWDED = 2


class _Sleeper(NamedTuple):
    """Something that a call wakes, or starts engines of."""

    key: Engine | str  # a cluster's name
    name: str
    wake: Callable[[], Awaitable[None]]  # until requests may go there


class _Idle(NamedTuple):
    """An engine without requests."""

    prompt_tokens: int  # its counter, which grows by the requests of other clients too
    since: float


class EngineSleep(CacheObserver):
    """Wakes an engine for requests whose engines all sleep, and one more where all that are awake have requests
    waiting. Engines sleep and are idle by their own metrics, so that requests past this proxy count."""

    def __init__(self, parts: CacheParts) -> None:
        self.held = 0
        self.lifetime = self._tasks = TaskSet()
        self._parts = parts
        self._clock = parts.clock
        self._counts = parts.metrics.group(SleepMetrics)
        self._calls = {name: list_wake_calls(one.settings) for name, one in parts.clusters.items()}
        self._waking: dict[Engine | str, asyncio.Task[None]] = {}
        self._falling_asleep: dict[Engine, asyncio.Task[None]] = {}
        self._failed_at: dict[Engine | str, float] = {}
        self._idle: dict[Engine, _Idle] = {}
        self._crowded: Counter[tuple[str, str]] = Counter()  # readings in a row, by cluster and model

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauge to this observer."""
        self._counts.held.set_source(lambda: [((), self.held)])

    def wake_for(self, cluster: Cluster, model: str) -> Awaitable[None] | None:
        """Return the wait for an engine of this model; None: none is needed, or none would help."""
        within_s = part_of(cluster.settings, SleepPlace).wake_within
        if not within_s:
            return None
        now = self._clock()
        if cluster.screening.may_serve(model, now) or not self._find_sleepers(cluster, model, now):
            return None
        return self._wait(cluster, model, within_s)

    async def _wait(self, cluster: Cluster, model: str, within_s: float) -> None:
        """Raise LocalReply where the engines sleep on."""
        if self.held >= MAX_HELD:
            raise _refusal("Too many requests wait for an engine to wake.", FAILED_S)
        began = now = self._clock()
        self.held += 1
        try:
            while not cluster.screening.may_serve(model, now):
                waking = self._wake_one(cluster.name, self._find_sleepers(cluster, model, now))
                if waking is None:
                    break
                left_s = began + within_s - now
                if left_s <= 0:
                    raise _refusal("No engine of this model is awake; one is being started.", within_s)
                await asyncio.wait({waking}, timeout=left_s)
                now = self._clock()
        finally:
            self.held -= 1
        if self._find_sleepers(cluster, model, now) and not cluster.screening.may_serve(model, now):
            raise _refusal("No engine of this model is awake, and none could be started.", FAILED_S)

    def _find_sleepers(self, cluster: Cluster, model: str, now: float) -> list[_Sleeper]:
        """Return the engines of this model that sleep, or a cluster without endpoints that calls may start."""
        found = [
            _Sleeper(engine, f"{cluster.name}/{engine.id}", partial(self._wake_engine, cluster, engine))
            for engine in find_sleeping(cluster, model, now)
        ]
        if self._calls[cluster.name] and not cluster.endpoints:
            found.append(_Sleeper(cluster.name, cluster.name, partial(self._start_engines, cluster)))
        return found

    def _wake_one(self, cluster: str, sleepers: Sequence[_Sleeper]) -> asyncio.Task[None] | None:
        """Return the call that wakes one of these, begun if there is none; None: all of them failed."""
        for one in sleepers:
            if one.key in self._waking:
                return self._waking[one.key]
        now = self._clock()
        for one in sleepers:
            if now - self._failed_at.get(one.key, -math.inf) >= FAILED_S:
                self._waking[one.key] = self._tasks.start(self._wake(cluster, one), name=f"wake {one.name}")
                return self._waking[one.key]
        return None

    async def _wake(self, cluster: str, sleeper: _Sleeper) -> None:
        began = self._clock()
        try:
            await sleeper.wake()
        except (ClientError, DiscoveryError) as error:
            self._failed_at[sleeper.key] = self._clock()
            self._counts.wakes.labels(cluster, "failed").inc()
            log.warning("[sleep] %s was not woken: %s", sleeper.name, error)
        else:
            self._counts.wakes.labels(cluster, "done").inc()
            log.info("[sleep] %s woke up in %.1f s", sleeper.name, self._clock() - began)
        finally:
            del self._waking[sleeper.key]

    async def _wake_engine(self, cluster: Cluster, engine: Engine) -> None:
        if (before := self._falling_asleep.get(engine)) is not None:
            await asyncio.wait({before})  # or its call could overtake that one
        await self._call(engine, WAKE_UP)
        _set_asleep(cluster, engine, False)
        self._idle.pop(engine, None)

    async def _start_engines(self, cluster: Cluster) -> None:
        for call in self._calls[cluster.name]:
            await call()
        within_s = part_of(cluster.settings, SleepPlace).wake_within
        began = self._clock()
        while not cluster.endpoints:
            if self._clock() - began > within_s:
                raise DiscoveryError(f"no endpoint was found within {within_s:g} s")
            await asyncio.sleep(LOOK_S)

    def tick(self) -> None:
        """After each reading of the engines' metrics: wake one more, or put idle ones to sleep."""
        now = self._clock()
        present = set[Engine]()
        for cluster in self._parts.clusters.values():
            present.update(cluster.engines)
            own = part_of(cluster.settings, SleepPlace)
            if own.wake_within:
                self._relieve(cluster, now)
            if own.sleep_after:
                for engine in cluster.engines:
                    if self._is_idle_for(cluster, engine, own.sleep_after, now):
                        self._begin_sleep(cluster, engine)
        for engine in self._idle.keys() - present:
            del self._idle[engine]
        for key in self._failed_at.keys() - present - self._calls.keys():
            del self._failed_at[key]

    def _relieve(self, cluster: Cluster, now: float) -> None:
        """Wake one more engine of a model if requests wait in all that are awake."""
        for model in cluster.screening.declared or ("",):
            pool = cluster.screening.find_pool(model, now)
            awake = () if pool.panic else pool.usable
            crowded = bool(awake) and all(one.load.engine and one.load.engine.waiting for one in awake)
            key = (cluster.name, model)
            self._crowded[key] = self._crowded[key] + 1 if crowded else 0
            if self._crowded[key] >= CROWDED:
                self._crowded[key] = 0
                self._wake_one(cluster.name, self._find_sleepers(cluster, model, now))

    def _is_idle_for(self, cluster: Cluster, engine: Engine, least_s: float, now: float) -> bool:
        endpoints = cluster.members.of_engine(engine)
        tokens = _read_idle(self._parts.signals, endpoints)
        if tokens is None or any(one.condition(now) is not Condition.UP for one in endpoints):
            self._idle.pop(engine, None)
            return False
        idle = self._idle.get(engine)
        if idle is None or idle.prompt_tokens != tokens:
            self._idle[engine] = _Idle(tokens, now)
            return False
        return now - idle.since >= least_s

    def _begin_sleep(self, cluster: Cluster, engine: Engine) -> None:
        del self._idle[engine]
        _set_asleep(cluster, engine, True)  # at once, so that nothing is sent there meanwhile
        name = f"sleep {cluster.name}/{engine.id}"
        self._falling_asleep[engine] = self._tasks.start(self._sleep(cluster, engine), name=name)

    async def _sleep(self, cluster: Cluster, engine: Engine) -> None:
        try:
            await self._call(engine, SLEEP)
        except ClientError as error:
            _set_asleep(cluster, engine, False)
            self._counts.sleeps.labels(cluster.name, "failed").inc()
            log.warning("[sleep] %s/%s was not put to sleep: %s", cluster.name, engine.id, error)
        else:
            for one in cluster.members.of_engine(engine):
                self._parts.overlap.indexes[cluster.name].forget_cache(one.id)
            self._counts.sleeps.labels(cluster.name, "done").inc()
            log.info("[sleep] %s/%s was idle and sleeps now", cluster.name, engine.id)
        finally:
            del self._falling_asleep[engine]

    async def _call(self, engine: Engine, path: str) -> None:
        await self._parts.engines.client(engine).api.call("POST", path, timeout_s=CALL_S)


def find_sleeping(cluster: Cluster, model: str, now: float) -> list[Engine]:
    """Return the engines that sleep and serve the model."""
    asleep = (one for one in cluster.endpoints if one.serves(model) and one.condition(now) is Condition.ASLEEP)
    return [*dict.fromkeys(one.engine for one in asleep)]


def _read_idle(signals: EngineReadings, endpoints: Sequence[Endpoint]) -> int | None:
    """Return the prompt tokens that an engine without requests has computed so far; None: it has requests, or does
    not report them."""
    total = 0
    for one in endpoints:
        reading = signals.latest_scrape(one)
        if reading is None or reading[0] > signals.max_age_s or one.load.in_flight:
            return None
        metrics = reading[1]
        if metrics.prompt_tokens is None or metrics.running != 0 or metrics.waiting != 0:
            return None
        total += metrics.prompt_tokens
    return total


def _set_asleep(cluster: Cluster, engine: Engine, asleep: bool) -> None:
    for one in cluster.members.of_engine(engine):
        one.asleep = asleep


def _refusal(message: str, after_s: float) -> LocalReply:
    return LocalReply(503, "asleep", message, headers=[(b"retry-after", b"%d" % math.ceil(after_s))])
