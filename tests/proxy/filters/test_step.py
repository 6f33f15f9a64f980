"""Filters that only act before and after: run together in one app, and each by itself as plain ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Headers
from kvproxy.proxy.filters.chain import FilterType, build_chain
from kvproxy.proxy.filters.step import Step, StepRun, joined
from kvproxy.proxy.request.body import ClientLeft
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver
from kvproxy.proxy.settings import FilterSpec
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.filter_context import filter_context


class Noting(Step):
    """Writes down what it sees, and does in `before` what it is told to."""

    def __init__(self, app: ASGIApp, name: str, notes: list[str], error: BaseException | None = None) -> None:
        super().__init__(app, metrics=Metrics(), clock=FakeClock())
        self.name = name
        self.notes = notes
        self.error = error

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None] | None:
        self.notes.append(f"{self.name} before")
        if self.error is not None:
            raise self.error
        return None

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        self.notes.append(f"{self.name} {status}")
        headers.append((b"x-seen-by", self.name.encode()))

    def after(self, exchange: Exchange, downstream: Downstream) -> None:
        self.notes.append(f"{self.name} after {downstream.status} {downstream.sent_bytes} {downstream.complete}")


class Waiting(Step):
    """Has to wait for something."""

    def before(self, exchange: Exchange, downstream: Downstream) -> Awaitable[None]:
        return self._wait(exchange)

    async def _wait(self, exchange: Exchange) -> None:
        exchange.request_id = "waited for"


def three(app: ASGIApp, notes: list[str], *, error: BaseException | None = None) -> Step:
    """Return three steps; the middle one may fail."""
    return Noting(Noting(Noting(app, "inner", notes), "middle", notes, error), "outer", notes)


async def test_neighbours_run_in_one_app_in_their_order() -> None:
    """Outermost first on the way in, innermost first on the way out."""
    notes: list[str] = []
    inner = Inner()
    run = joined(three(inner, notes))
    assert isinstance(run, StepRun)
    assert run.app is inner
    reply = await call(run, http_scope(headers=[(b"a", b"b")]))
    assert [value for name, value in reply.messages[0]["headers"] if name == b"x-seen-by"] == [
        b"inner",
        b"middle",
        b"outer",
    ]
    assert notes == [
        *("outer before", "middle before", "inner before"),
        *("inner 200", "middle 200", "outer 200"),
        *("inner after 200 2 True", "middle after 200 2 True", "outer after 200 2 True"),
    ]


class Terminal(Inner):
    """An app that takes over the state of the steps before it."""

    async def serve_request(self, exchange: Exchange, downstream: Downstream) -> None:
        await downstream.start(204, [], b"", more=False)


class Delegating:
    """A filter that delegates what it lacks to the app that it wraps."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@pytest.mark.parametrize(("wrap", "status"), [(lambda app: app, 204), (Delegating, 200)])
async def test_an_app_right_behind_the_steps_may_take_over_their_state(
    wrap: Callable[[ASGIApp], ASGIApp], status: int
) -> None:
    """A filter between them is not passed over."""
    reply = await call(joined(three(wrap(Terminal()), [])), http_scope())
    assert reply.status == status


async def test_a_refusal_is_seen_by_the_steps_before_it_alone() -> None:
    """The app is not called; the steps that had their turn are told of the end."""
    notes: list[str] = []
    inner = Inner()
    refusal = LocalReply(418, "teapot", "No coffee.", headers=[(b"x-pot", b"tea")])
    reply = await call(three(inner, notes, error=refusal), http_scope())
    assert (reply.status, reply.json["error"]["code"], reply.headers[b"x-pot"]) == (418, "teapot", b"tea")
    assert not inner.scopes
    assert notes[:3] == ["outer before", "middle before", "outer 418"]
    assert [note.split()[:2] for note in notes[3:]] == [["middle", "after"], ["outer", "after"]]


async def test_a_client_that_left_gets_no_answer() -> None:
    """And the exchange says so."""
    notes: list[str] = []
    scope = http_scope()
    exchange = Exchange.of(scope, now=0.0)
    reply = await call(three(Inner(), notes, error=ClientLeft()), scope)
    assert (reply.messages, exchange.outcome.end, exchange.outcome.status) == ([], "client_disconnected", 499)


@pytest.mark.parametrize("error", [ZeroDivisionError(), LocalReply(400, "later", "Too late.")])
async def test_errors_of_the_app_pass_through_every_step(error: Exception) -> None:
    """A refusal too: only a step's own `before` is answered."""
    notes: list[str] = []

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    with pytest.raises(type(error)):
        await call(three(broken, notes), http_scope())
    assert [note.split()[1] for note in notes] == ["before"] * 3 + ["after"] * 3


async def test_a_step_that_fails_after_a_request_does_not_keep_the_others_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged."""

    class Broken(Step):
        def after(self, exchange: Exchange, downstream: Downstream) -> None:
            raise ZeroDivisionError

    notes: list[str] = []
    broken = Broken(Inner(), metrics=Metrics(), clock=FakeClock())
    assert (await call(Noting(broken, "outer", notes), http_scope())).status == 200
    assert notes[-1] == "outer after 200 2 True"
    assert "a filter failed after a request: Broken" in caplog.text


async def test_a_step_may_wait() -> None:
    """Its work is done before the next one begins."""
    inner = Inner()
    await call(Waiting(inner, metrics=Metrics(), clock=FakeClock()), http_scope())
    assert inner.exchange.request_id == "waited for"


async def test_other_scopes_pass_unless_a_step_answers_them() -> None:
    """Steps are about http."""

    class Answers(Step):
        async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
            return bool(scope["type"] == "websocket")

    notes: list[str] = []
    inner = Inner()
    app = Noting(Answers(inner, metrics=Metrics(), clock=FakeClock()), "outer", notes)
    await call(app, {"type": "websocket"})
    await call(app, {"type": "lifespan"})
    assert (inner.scopes, notes) == ([{"type": "lifespan"}], [])


async def test_the_scope_of_another_server_stays_as_it_is() -> None:
    """Servers around the steps may read it afterwards."""

    class Changes(Step):
        def before(self, exchange: Exchange, downstream: Downstream) -> None:
            downstream.scope["headers"] = [(b"only", b"this")]

    inner, scope = Inner(), http_scope(headers=[(b"a", b"b")])
    await call(Changes(inner, metrics=Metrics(), clock=FakeClock()), scope)
    assert inner.scopes[0]["headers"] == [(b"only", b"this")]
    assert scope["headers"] == [(b"a", b"b")]


class Counts(RequestObserver):
    """Counts the pieces and ends it hears of."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        self.heard.append(status)

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        self.heard.append(piece)

    def ended(self, exchange: Exchange, status: int, crash: str) -> None:
        self.heard.append((status, crash))


def plain_filter(inner: ASGIApp, settings: object, context: Any) -> ASGIApp:
    """Return a foreign filter: it wraps `send`, changes every piece, and sees every message."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_changed(message: Any) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": message["body"].upper()}
            await send(message)

        await inner({**scope, "by": "plain"}, receive, send_changed)

    return app


async def test_a_filter_of_todays_interface_between_steps_sees_every_message() -> None:
    """Steps before and after it run as before, and observers hear of what goes out, once."""
    notes: list[str] = []
    counts = Counts()

    class Attaches(Step):
        def before(self, exchange: Exchange, downstream: Downstream) -> None:
            exchange.attach(counts)

    context = filter_context()
    types = {
        "attaches": FilterType(None, lambda app, _, c: Attaches(app, metrics=c.metrics, clock=c.clock)),
        "outer": FilterType(None, lambda app, _, c: Noting(app, "outer", notes)),
        "plain": FilterType(None, plain_filter),
        "inner": FilterType(None, lambda app, _, c: Noting(app, "inner", notes)),
    }
    inner = Inner(chunks=(b"ab", b"c"))
    specs = [FilterSpec(name=name) for name in types]
    chain = build_chain(specs, inner, context=context, types=types)
    assert isinstance(chain, StepRun)
    assert len(chain.steps) == 2
    reply = await call(chain, http_scope())
    assert reply.body == b"ABC"
    assert inner.scopes[0]["by"] == "plain"
    assert counts.heard == [200, b"AB", b"C", (200, "")]
    assert notes[-2:] == ["inner after 200 3 True", "outer after 200 3 True"]


async def test_a_crash_is_told_to_observers_by_its_name() -> None:
    """Tracing ends its span with it."""
    counts = Counts()

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        Exchange.of(scope, now=0.0).attach(counts)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await call(Noting(crash, "outer", []), http_scope())
    assert counts.heard == [(0, "KeyError")]
