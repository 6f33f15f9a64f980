"""Filters that only act before and after a request, and the ASGI app that runs neighbouring ones together."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.proxy.request.body import ClientLeft
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply, refuse
from kvproxy.proxy.request.exchange import SCOPE_KEY, Exchange

logger = logging.getLogger("kvproxy.filters")


class Step:
    """Filter around `app` that acts on a request only before and after it.

    State of one request goes into its exchange, or into an observer of it. By itself a step is an ASGI app like every
    filter; in a chain, neighbouring steps run in one."""

    #: Whether it may look at `scope["state"]`, so that filters before it have to keep that up to date.
    reads_state: ClassVar[bool] = True

    def __init__(self, app: ASGIApp, *, metrics: Metrics, clock: Clock) -> None:
        self.app = app
        self.metrics = metrics
        self.clock = clock
        self._alone: StepRun | None = None

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None] | None:
        """Handle the request's arrival; an awaitable is awaited. `downstream.scope` may be changed, its headers by a
        new list.

        Raises LocalReply to have the proxy answer, ClientLeft if there is no client to answer; the steps before this
        one see the head of the answer, this one and those after it do not."""
        return None

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        """Handle the head of the response; the list may be changed in place. Innermost step first."""

    def after(self, exchange: Exchange, downstream: Downstream) -> None:
        """Handle the end of a request that reached this step's `before`. Innermost step first."""

    async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Return True if a scope of another type than http (a websocket, a lifespan) was answered here."""
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._alone is None:
            self._alone = joined(self)
        await self._alone(scope, receive, send)


def joined(outer: Step) -> StepRun:
    """Return the step and those right behind it as one app."""
    inner = outer.app
    if isinstance(inner, Step):
        inner = joined(inner)
    if isinstance(inner, StepRun):
        return StepRun((outer, *inner.steps), inner.app)
    return StepRun((outer,), inner)


def may_read_state(app: ASGIApp) -> bool:
    """Return False if no app from this one on looks at `scope["state"]`; those that do not name `reads_state` may."""
    while isinstance(app, Step | StepRun):
        if any(step.reads_state for step in (app.steps if isinstance(app, StepRun) else (app,))):
            return True
        app = app.app
    return bool(getattr(app, "reads_state", True))


def _own(step: Step, name: str) -> bool:
    return getattr(type(step), name) is not getattr(Step, name)


class StepRun:
    """Neighbouring steps, the outermost first, around `app`. Hooks that a step leaves alone are not called."""

    def __init__(self, steps: Sequence[Step], app: ASGIApp) -> None:
        self.steps = tuple(steps)
        self.app = app
        self._clock = steps[0].clock
        self._metrics = steps[0].metrics
        numbered = list(enumerate(self.steps))
        self._befores = [(at, step.before) for at, step in numbered if _own(step, "before")]
        self._heads = [(at, step.response_started) for at, step in reversed(numbered) if _own(step, "response_started")]
        self._afters = [(at, step.after) for at, step in reversed(numbered) if _own(step, "after")]
        self._hooks = tuple(hook for _, hook in self._heads)
        #: Of the router, which needs no ASGI between the steps and itself. (Its class is asked, since a wrapper may
        #: delegate what it lacks.)
        self._serve: Callable[[Exchange, Downstream], Awaitable[None]] | None = None
        if hasattr(type(app), "serve_request"):
            self._serve = app.serve_request  # type: ignore[attr-defined]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        exchange: Exchange | None = scope.get(SCOPE_KEY)
        if exchange is None:
            exchange = scope[SCOPE_KEY] = Exchange(received_at=self._clock())
        downstream = Downstream.begin(exchange, scope, receive, send, self._hooks)
        reached = crash = None
        try:
            for at, before in self._befores:
                reached = at
                waits = before(exchange, downstream)
                if waits is not None:
                    await waits
            reached = None
            if self._serve is not None:
                await self._serve(exchange, downstream)
            else:
                await self.app(downstream.scope, downstream.receive, downstream.send)
        except LocalReply as why:
            if reached is None:
                raise
            downstream.hooks = tuple(hook for at, hook in self._heads if at < reached)
            await refuse(why, downstream.scope, receive, downstream.send, metrics=self._metrics)
        except ClientLeft:
            if reached is None:
                raise
            exchange.outcome.client_left()
        except Exception as error:
            crash = type(error).__name__
            raise
        finally:
            for at, after in self._afters:
                if reached is None or at <= reached:
                    try:
                        after(exchange, downstream)
                    except Exception:
                        logger.exception("a filter failed after a request: %s", type(self.steps[at]).__name__)
            if exchange.held_bytes and exchange.release is not None:
                exchange.release(exchange.held_bytes)
                exchange.held_bytes = 0
            if "ended" in exchange.hooks:
                downstream.end(crash or "")

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        for step in self.steps:
            if await step.answers(scope, receive, send):
                return
        await self.app(scope, receive, send)
