"""The filter chain: what a filter is built from, and the chain itself, outermost filter first."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.types import ASGIApp

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.retry import RetryBudget
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import dotted_path
from kvproxy.base.types import Clock, Headers
from kvproxy.proxy.filters.step import Step, joined
from kvproxy.proxy.request.observer import RequestObserver
from kvproxy.proxy.settings import FilterSpec, ServingSettings

if TYPE_CHECKING:
    from kvproxy.base.upstream.pool import UpstreamPool
    from kvproxy.cache.service import KvCache
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.routes import RouteTarget
    from kvproxy.proxy.request.body import HeldBodies
    from kvproxy.proxy.request.exchange import Exchange

T = TypeVar("T")


class ChargedLimits(Protocol):
    """Limits by key and kind that several processes charge together."""

    #: Called with the key, the kind and the amount of each charge; returns the amount to charge.
    watch: Callable[[str, str, float], float] | None

    def take(self, key: str, kind: str, amount: float, now: float) -> None:
        """Take an amount that another process charged."""
        ...

    def take_until(self, key: str, kind: str, missing: float, now: float) -> None:
        """Take what is there until so much is missing, as at another process."""
        ...

    def missing(self, now: float) -> Iterator[tuple[str, str, float]]:
        """Yield key, kind and what is missing of each limit that is not unused. Not to be changed meanwhile."""
        ...


class RequestGuard(Protocol):
    """Check of requests that other programs carry; a filter makes the same of those that pass it."""

    def reads_bodies(self, method: str) -> bool:
        """Return whether the body of such a request matters now, on every path."""
        ...

    async def examine(self, exchange: Exchange, path: str, headers: Headers, body: bytes | None) -> None:
        """Bar endpoints, or set the id for engines. Raises LocalReply for a request that no endpoint may get."""
        ...


#: The current moment as an aware datetime.
WallClock = Callable[[], datetime]


class ResolvesRoutes(Protocol):
    """The routes, as far as filters need them."""

    def resolve(self, path: str, model: str) -> RouteTarget | None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """The long-lived things a terminal filter forwards with; the application owns their lives."""

    clusters: Mapping[str, Cluster]
    routes: ResolvesRoutes
    pool: UpstreamPool
    bodies: HeldBodies


class States(Protocol):
    """State that outlives a reload: each configuration finds that of earlier ones, as long as one of them serves."""

    def get(self, kind: type[T], name: Hashable, make: Callable[[], T]) -> T:
        """Return the state of this kind and name; made without any effect beyond itself where there is none."""


@dataclass(frozen=True, slots=True)
class FilterContext:
    """Resources of every filter besides its own settings."""

    config: ServingSettings
    metrics: Metrics
    clock: Clock
    wall_clock: WallClock  # for log lines and `created` fields only
    rng: random.Random
    services: Services
    states: States  # state that outlives a reload
    #: Lifetimes of filters, entered before the first request and left after the last, in order.
    lifetimes: list[AbstractAsyncContextManager[object]] = field(default_factory=list)
    #: Services behind `kvcache`, for status, by the name of their filter, of which a chain has one.
    kvcaches: dict[str, KvCache] = field(default_factory=dict)
    #: Called when the chain begins to serve: gauges are bound there, since a chain that is built may still be refused.
    on_serving: list[Callable[[], None]] = field(default_factory=list)
    #: Retry budgets of routers, and charged limits, by the name of their filter.
    budgets: dict[str, RetryBudget] = field(default_factory=dict)
    limits: dict[str, ChargedLimits] = field(default_factory=dict)
    #: Checks for requests that pass no filter.
    guards: list[RequestGuard] = field(default_factory=list)
    #: Observe every request that reaches the router.
    observers: list[RequestObserver] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FilterType:
    """A kind of filter.

    `settings` is the model its settings are decoded into (its defaults when the configuration gives none); None:
    `build` gets the configuration's plain data. `build(inner, settings, context)` returns the ASGI app and may raise
    ConfigError, with paths relative to the filter's settings. A `terminal` filter answers by itself: nothing may follow
    it."""

    settings: type[Model] | None
    build: Callable[[ASGIApp, Any, FilterContext], ASGIApp]
    terminal: bool = False


def build_chain(
    specs: Sequence[FilterSpec], terminal: ASGIApp, *, context: FilterContext, types: Mapping[str, FilterType]
) -> ASGIApp:
    """Return the filters of `specs` around `terminal`, the first one outermost.

    Neighbouring steps become one app. `terminal` answers what no filter did. Raises ConfigError with the problems of
    every filter at once.
    """
    problems = _misplaced(specs, types)
    app = terminal
    for index in reversed(range(len(specs))):
        where = f"filters[{index}].{specs[index].name}"
        try:
            app = _build_one(specs[index], app, context, types)
        except ConfigError as error:
            problems += [Problem(_join(where, p.path), p.message, p.hint) for p in error.problems]
        except Exception as error:  # noqa: BLE001 - third-party code: any error is a problem of that filter
            problems.append(Problem(where, f"cannot be built: {type(error).__name__}: {error}"))
        if isinstance(app, Step):
            app = joined(app)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.path))
    return app


def _build_one(spec: FilterSpec, inner: ASGIApp, context: FilterContext, types: Mapping[str, FilterType]) -> ASGIApp:
    kind = types.get(spec.name)
    if kind is None:
        raise ConfigError([Problem("", f"no filter is called {spec.name!r}", _nearest(spec.name, types))])
    return kind.build(inner, _typed_settings(spec, kind), context)


def _typed_settings(spec: FilterSpec, kind: FilterType) -> Any:
    if kind.settings is None or isinstance(spec.settings, kind.settings):
        return spec.settings
    try:
        return composed(kind.settings).model_validate({} if spec.settings is None else spec.settings)
    except ValidationError as error:
        details = error.errors(include_input=False, include_url=False)
        raise ConfigError([Problem(dotted_path(d["loc"]), d["msg"]) for d in details]) from None


def _misplaced(specs: Sequence[FilterSpec], types: Mapping[str, FilterType]) -> list[Problem]:
    """Return a terminal filter that is not the last one makes the rest unreachable."""
    return [
        Problem(f"filters[{index}].{spec.name}", "is terminal, so the filters after it never run", "put it last")
        for index, spec in enumerate(specs[:-1])
        if spec.name in types and types[spec.name].terminal
    ]


def _nearest(name: str, types: Mapping[str, FilterType]) -> str:
    close = difflib.get_close_matches(name, types, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(types))}"


def _join(where: str, path: str) -> str:
    return f"{where}.{path}" if path else where
