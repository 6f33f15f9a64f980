"""Parts built from one configuration, state that outlives it at a reload, and the change from one generation to the
next."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.installed import installed
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.types import Clock
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.prober import HttpProbe
from kvproxy.cluster.routes import Routes
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.companion import Companion
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.verify import own_address_fault
from kvproxy.operate.feature import Feature
from kvproxy.operate.filter_plugins import discover
from kvproxy.operate.runtime.operated import Reloaded
from kvproxy.proxy.filter_settings import order_filters
from kvproxy.proxy.filters.chain import FilterContext, FilterType, Services, WallClock, build_chain
from kvproxy.proxy.filters.registry import list_filters
from kvproxy.proxy.request.body import HeldBodies
from kvproxy.proxy.request.error_reply import local_reply
from kvproxy.proxy.request.observer import RequestObserver
from kvproxy.proxy.settings import FilterSpec

log = logging.getLogger("kvproxy")

T = TypeVar("T")

Key = tuple[type, Hashable]
Close = Callable[[Any], None]

_LOOK_AGAIN_S = 0.1
Part = AbstractAsyncContextManager[object]


class StateStore:
    """States of the living generations; a state that none of them uses is dropped."""

    def __init__(self) -> None:
        self._living: list[GenerationStates] = []  # the oldest first

    def draft_states(self) -> GenerationStates:
        """For a generation that is being built: it finds what is there, and adds nothing before it is kept."""
        return GenerationStates(self._living)

    def forget_states(self, ended: Collection[object]) -> None:
        """Let no further generation use these states."""
        for states in self._living:
            states.forget_states(ended)


class GenerationStates:
    """The states one generation uses; asked for while it is built, kept while it lives."""

    def __init__(self, living: list[GenerationStates]) -> None:
        self._living = living
        self._used: dict[Key, object] = {}
        self._closes: dict[Key, Close] = {}

    def get(
        self, kind: type[T], name: Hashable, make: Callable[[], T], *, close: Callable[[T], None] | None = None
    ) -> T:
        """Return the state of this kind and name: this generation's, else that of the latest living one that has it,
        else a new one, whose making must have no effect beyond itself. `close` is called once no living generation uses
        it.
        """
        key = (kind, name)
        if key not in self._used:
            earlier = (other._used[key] for other in reversed(self._living) if key in other._used)
            found = next(earlier, None)
            self._used[key] = make() if found is None else found
            if close is not None:
                self._closes[key] = close
        return cast("T", self._used[key])

    def forget_states(self, ended: Collection[object]) -> None:
        """Drop states that ended by themselves; they are not closed."""
        for key in [key for key, state in self._used.items() if state in ended]:
            del self._used[key]
            self._closes.pop(key, None)

    def keep_states(self) -> None:
        """Keep the states: the generation lives from now on."""
        self._living.append(self)

    def release_states(self) -> None:
        """Release the states: those that only this generation used are closed and dropped."""
        if self not in self._living:
            return
        self._living.remove(self)
        for key, close in self._closes.items():
            state = self._used[key]
            if any(other._used.get(key) is state for other in self._living):
                continue
            try:
                close(state)
            except Exception:
                log.exception("a state that no configuration uses any more cannot be closed")


@dataclass(frozen=True, slots=True)
class Shared:
    """Resources that outlive every generation."""

    metrics: Metrics
    clock: Clock
    wall_clock: WallClock
    rng: random.Random
    pool: UpstreamPool
    probes: UpstreamPool
    extra_filters: Mapping[str, FilterType] | None
    observers: tuple[RequestObserver, ...]
    bodies: HeldBodies


class Generation:
    """Parts built from one configuration and the existing states, whole or not at all (ConfigError).

    Making it has no effect. It serves once its `states` are kept, its `parts` entered and `serve` was called. `running`
    counts its open requests, those in its `chain`."""

    def __init__(self, config: Config, shared: Shared, store: StateStore) -> None:
        self.config = config
        self._shared = shared
        self.running = 0
        self.states = store.draft_states()
        self.clusters: dict[str, Cluster] = {
            name: self.states.get(Cluster, name, partial(self._cluster, name, settings), close=Cluster.close)
            for name, settings in config.clusters.items()
        }
        routes = self.routes = Routes.from_settings(config.routes, self.clusters)
        context = FilterContext(
            config,
            shared.metrics,
            shared.clock,
            shared.wall_clock,
            shared.rng,
            Services(self.clusters, routes, shared.pool, shared.bodies),
            self.states,
            observers=list(shared.observers),
        )
        specs = config.filters or tuple(FilterSpec(name=name) for name in order_filters())
        extra = shared.extra_filters
        types = {**(discover({spec.name for spec in specs}) if extra is None else extra), **list_filters()}
        if specs[-1].name == "router":
            guards = dict(guard for feature in installed(Feature) for guard in feature.list_guards(config))
            specs = (*specs[:-1], *(FilterSpec(name=name) for name in guards), specs[-1])
            types |= guards
        self.chain: ASGIApp = build_chain(specs, self._not_found, context=context, types=types)
        self.kvcaches: dict[str, KvCache] = context.kvcaches
        self._on_serving = context.on_serving
        self.budgets = context.budgets
        self.limits = context.limits
        self.guards = tuple(context.guards)
        #: In the order they are entered; some may be running already, in the previous generation.
        self.parts: list[AbstractAsyncContextManager[object]] = [*self.clusters.values(), *context.lifetimes]

    def begin_serving(self) -> None:
        """From now on this is the configuration: clusters get its settings, and gauges read what it uses."""
        for name, cluster in self.clusters.items():
            settings = self.config.clusters[name]
            if settings != cluster.settings:
                cluster.reconfigure(settings, probe=self._probe(settings))
            cluster.bind_gauges()
        for bind in self._on_serving:
            bind()

    def _cluster(self, name: str, settings: ClusterSettings) -> Cluster:
        shared = self._shared
        return Cluster(
            name,
            settings,
            metrics=shared.metrics,
            clock=shared.clock,
            rng=shared.rng,
            probe=self._probe(settings),
            refuse=partial(own_address_fault, self.config),
        )

    def _probe(self, settings: ClusterSettings) -> HttpProbe:
        return HttpProbe(self._shared.probes, settings.health)

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in a chain without a router."""
        message = "No filter answered this request."
        metrics = self._shared.metrics
        await local_reply(scope, send, status=404, reason="no_filter", message=message, metrics=metrics)


class Reloader:
    """Owns what runs. Leaving it ends everything, in the reverse order of its start."""

    def __init__(self, *, clock: Clock, patience_s: float) -> None:
        self.ended = 0  # number of ended generations
        self._clock = clock
        self._patience_s = patience_s
        self._living: list[Generation] = []
        self._alive: dict[Part, AsyncExitStack] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Reloader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._retiring)
        await self._end(list(self._alive))

    async def begin_generation(self, generation: Generation) -> None:
        """Keep its states and start those of its parts that do not run yet; if one cannot start, undo it and raise its
        error."""
        generation.states.keep_states()  # at once: the end of an earlier one must not close states that this one uses
        self._living.append(generation)
        try:
            for part in generation.parts:
                if part not in self._alive:
                    stack = AsyncExitStack()
                    await stack.enter_async_context(part)
                    self._alive[part] = stack
        except BaseException:
            await self._forget(generation)
            raise

    def retire_generation(self, generation: Generation) -> None:
        """End what only this one needs, once its last request is over or patience is."""
        task = asyncio.create_task(self._retire(generation), name="retire generation")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, generation: Generation) -> None:
        give_up_at = self._clock() + self._patience_s
        while generation.running and self._clock() < give_up_at:  # noqa: ASYNC110 - a count kept on the hot path
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._forget(generation)
        self.ended += 1

    async def _forget(self, generation: Generation) -> None:
        self._living.remove(generation)
        # before any wait: a generation built meanwhile must not find states that end here
        generation.states.release_states()
        needed = [part for other in self._living for part in other.parts]
        await self._end([part for part in generation.parts if part not in needed])

    async def _end(self, parts: list[Part]) -> None:
        for part in reversed(parts):
            stack = self._alive.pop(part, None)
            if stack is None:
                continue
            try:
                await stack.aclose()
            except Exception:
                log.exception("a part of the proxy ended with an error")


class Generations:
    """An async context manager: inside it `current` serves. `companions` follow it; they are set before.

    A reload has two halves: `prepare` may fail, and `adopt` takes its generation into use, or `discard` ends it.
    """

    def __init__(self, config: Config, shared: Shared, *, certificates: CertificateWatch) -> None:
        self.shared = shared
        self.companions: Sequence[Companion] = ()
        self._certificates = certificates
        self._states = StateStore()
        self._reloader = Reloader(clock=shared.clock, patience_s=config.shutdown.drain)
        self.current = Generation(config, shared, self._states)
        self._running: AsyncExitStack | None = None
        self._tried = False  # to start

    @property
    def ended(self) -> int:
        """Generations that were replaced and have ended."""
        return self._reloader.ended

    async def prepare(self, config: Config) -> Generation:
        """Return a generation whose parts run. Raises ConfigError, and whatever a new part raises when it starts; then
        nothing has changed."""
        await self._certificates.look()
        after = Generation(config, self.shared, self._states)
        await self._reloader.begin_generation(after)
        await asyncio.sleep(0)  # thousands of endpoints take long enough without the build in the same turn
        return after

    def adopt(self, after: Generation) -> Reloaded:
        """Serve by it from now on; running requests finish by the one before."""
        before = self.current
        after.begin_serving()
        self.current = after
        self._follow()
        self._reloader.retire_generation(before)
        return Reloaded(after_restart=tuple(_needs_restart(before.config, after.config)))

    def discard(self, after: Generation) -> None:
        """End one that was prepared."""
        self._reloader.retire_generation(after)

    async def __aenter__(self) -> Generations:
        before = self.current
        after = self._renew_parts(before) if self._tried else before
        self._tried = True
        async with AsyncExitStack() as starting:  # a part that cannot start ends those before it
            await starting.enter_async_context(self._reloader)
            await self._reloader.begin_generation(after)
            if after is not before:
                before.states.release_states()
            self.current = after
            after.begin_serving()
            self._follow()
            for companion in self.companions:
                await starting.enter_async_context(companion)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        running = self._running
        self._running = None
        if running is not None:
            await running.aclose()

    def _renew_parts(self, before: Generation) -> Generation:
        """Make the parts again, since most run once; what was learned goes on. Clusters do too, unless they were never
        ended, because their event loop is gone."""
        gone = self._running is not None
        kept = () if gone else tuple(before.clusters.values())
        self._running = None
        self._states.forget_states([part for part in before.parts if part not in kept])
        self._reloader = Reloader(clock=self.shared.clock, patience_s=before.config.shutdown.drain)
        return Generation(before.config, self.shared, self._states)

    def _follow(self) -> None:
        for companion in self.companions:
            companion.follow(self.current)


def _needs_restart(old: Config, new: Config) -> list[str]:
    """Return changed settings that take effect only at the next start of the process, by path."""
    names = ("listen", "admin", "limits", "pool", "shutdown", "log", "receipts")
    of_features = (name for feature in settings_of_features() for name in feature.read_at_start)
    return [name for name in (*names, *of_features) if getattr(old, name) != getattr(new, name)]
