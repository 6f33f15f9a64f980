"""Warming by itself: what is worth it, when it may be done, and what comes of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.strategies import Action
from kvproxy.cache.feedback.trust import LossReason
from kvproxy.features.warming.warming import PIECE_TOKENS, RETRY_S, Warming
from kvproxy.operate.config.load import check_config
from tests.cache.support import A, B, Fake, Service, chat, engine, long_text, world
from tests.support.clock import FakeClock

SYSTEM = long_text("s", 400)
#: Whether the engine is asked at all, and how busy it says to be.
IDLE, BUSY = (0, 0), (8, 1)


class Engine:
    """An engine that counts a prompt's tokens as cached once it was sent them."""

    def __init__(self, load: tuple[int, int] = IDLE, *, says_cached: bool = True, status: int = 200) -> None:
        self.load, self.says_cached, self.status = load, says_cached, status
        self.prompts: list[list[int]] = []
        self.app: Fake = engine()
        self.app.routes |= {"/metrics": self._metrics, "/v1/completions": self._complete}

    def _metrics(self, _: dict[str, Any]) -> bytes:
        running, waiting = self.load
        return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n".encode()

    def _complete(self, asked: dict[str, Any]) -> Any:
        if self.status != 200:
            return self.status, {"error": {"message": "no"}}
        prompt, before = asked["prompt"], self.prompts[-1:]
        cached = len(before[0]) if before and prompt[: len(before[0])] == before[0] else 0
        self.prompts.append(prompt)
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.says_cached else {}
        return {"usage": {"prompt_tokens": len(prompt), **details}}


class SteppingClock(FakeClock):
    """Goes on by itself with each look at it."""

    step_s = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@contextlib.asynccontextmanager
async def warming(a: Engine, b: Engine, clock: FakeClock, **changes: Any) -> AsyncIterator[Service]:
    """Yield a service whose endpoint `a` was asked for one system prompt by four sessions."""
    given = {"enabled": True, "uses_per_replica": 2, **changes.pop("warming", {})}
    strategy = {"hot_content_threshold": 3, **changes.pop("cache_strategy", {})}
    more = {"warming": given, "cache_strategy": strategy, "kv_events": True, **changes}
    async with world({"a": a.app, "b": b.app}, clock=clock, **more) as service:
        await rounds(service)
        for session in range(4):
            await service.serve(chat(SYSTEM, "yes", f"{session} " * 40, user=f"user {session}"), A)
            await service.settled()
        yield service


def warming_of(service: Service) -> Warming:
    """Return the observer of a service that warms by itself."""
    found = service.kv.observers.find(Warming)
    assert found is not None
    return found


async def rounds(service: Service) -> None:
    """One round of the scraper, and all that came of it."""
    warming_of(service).tick()
    await service.settled()


def done(service: Service, result: str = "done") -> float:
    """How many prefixes were warmed so."""
    return service.metric("kvproxy_kvcache_actions_total", action="warm", result=result)


async def test_a_hot_prefix_gets_a_replica_and_it_is_verified(caplog: pytest.LogCaptureFixture) -> None:
    """Four uses at two a replica want two holders: the other endpoint gets the tokens that all four share."""
    a, b = Engine(), Engine()
    caplog.set_level(logging.INFO, "kvproxy.audit")
    async with warming(a, b, FakeClock()) as service:
        await rounds(service)
        assert done(service) == 1
        assert service.metric("kvproxy_kvcache_warmed_tokens_total", state="found") == len(b.prompts[0])
        await rounds(service)
        assert done(service) == 1
    assert a.prompts == []
    assert len(b.prompts) == 2
    assert b.prompts[0] == b.prompts[1]
    assert 400 <= len(b.prompts[0]) < 410
    line = next(one for one in caplog.messages if "warm" in one)
    assert "4 uses, 1 of 2 holders" in line
    assert "s0" not in line


async def test_an_engine_that_lost_its_cache_gets_back_what_is_hot() -> None:
    """Whatever the number of holders; the reason is that of the loss."""
    a, b = Engine(), Engine()
    async with warming(a, b, FakeClock(), warming={"uses_per_replica": 100}) as service:
        await rounds(service)
        assert (a.prompts, b.prompts) == ([], [])
        service.kv.state.losses.note_loss("default", A, LossReason.RESTARTED)
        await rounds(service)
        assert done(service) == 1
        assert (len(a.prompts), len(b.prompts)) == (2, 0)
        await rounds(service)
        assert len(a.prompts) == 2


async def test_an_engine_that_has_back_what_was_hot_is_as_any_other() -> None:
    """Prefixes that become hot later are not missing there for the loss, and go to as many as their traffic is
    worth."""
    a, b = Engine(), Engine()
    async with warming(a, b, FakeClock(), warming={"uses_per_replica": 100}) as service:
        service.kv.state.losses.note_loss("default", A, LossReason.RESTARTED)
        for _ in range(3):
            await rounds(service)
        assert (len(a.prompts), len(b.prompts)) == (2, 0)
        for session in range(4):
            await service.serve(chat(long_text("later", 400), "yes", f"{session} " * 40, user=f"other {session}"), B)
            await service.settled()
        await rounds(service)
        assert (len(a.prompts), len(b.prompts)) == (2, 0)


async def test_one_loss_counts_once_however_long_a_round_takes() -> None:
    """A clock that goes on while a round looks at the endpoints makes no second loss of the first one."""
    a, b, clock = Engine(), Engine(), SteppingClock()
    async with warming(a, b, clock, warming={"uses_per_replica": 100}) as service:
        service.kv.state.losses.note_loss("default", A, LossReason.RESTARTED)
        await rounds(service)
        assert len(a.prompts) == 2
        clock.step_s = 0.002
        await rounds(service)
        assert len(a.prompts) == 2


async def test_a_new_endpoint_gets_what_is_hot() -> None:
    """One that was there from the start is not new."""
    a, b = Engine(), Engine()
    async with warming(a, b, FakeClock(), warming={"uses_per_replica": 100}) as service:
        del warming_of(service)._known["default", B]
        await rounds(service)
    assert (len(a.prompts), len(b.prompts)) == (0, 2)


async def test_a_busy_engine_is_left_alone_until_it_is_idle() -> None:
    """By its own word, which it is asked for again in the next round."""
    a, b = Engine(), Engine(BUSY)
    async with warming(a, b, FakeClock()) as service:
        await rounds(service)
        assert (done(service, "busy"), b.prompts) == (1, [])
        b.load = IDLE
        await rounds(service)
        assert (done(service), len(b.prompts)) == (1, 2)


async def test_an_engine_that_refuses_is_left_alone_for_a_while() -> None:
    """Then it is tried again."""
    clock, b = FakeClock(), Engine(status=500)
    async with warming(Engine(), b, clock) as service:
        await rounds(service)
        b.status = 200
        await rounds(service)
        assert b.prompts == []
        clock.advance(RETRY_S)
        await rounds(service)
        assert (done(service), len(b.prompts)) == (1, 2)


class RemoteLoad:
    """Another proxy has what is claimed, for so long."""

    granted = False

    def __init__(self) -> None:
        self.claimed: list[tuple[str, float]] = []

    async def claim(self, what: str, ttl_s: float) -> bool:
        self.claimed.append((what, ttl_s))
        return self.granted

    def acted(self, action: Action) -> None:
        raise AssertionError(action)


async def test_prefixes_warmed_by_another_proxy_are_skipped() -> None:
    """It is looked at again once that may have ended."""
    clock, b, elsewhere = FakeClock(), Engine(), RemoteLoad()
    async with warming(Engine(), b, clock) as service:
        service.kv.actions.executor.claims = elsewhere
        await rounds(service)
        await rounds(service)
        assert (done(service, "elsewhere"), b.prompts) == (1, [])
        [(what, ttl_s)] = elsewhere.claimed
        assert what.startswith("warm b ")
        assert ttl_s == service.kv.settings.background.job_timeout
        elsewhere.granted = True
        clock.advance(RETRY_S)
        await rounds(service)
        assert (done(service), len(b.prompts)) == (1, 2)


async def test_requests_of_this_proxy_keep_an_endpoint_from_being_warmed() -> None:
    """Whatever its engine said last."""
    a, b = Engine(), Engine()
    async with warming(a, b, FakeClock()) as service:
        endpoint = next(one for one in service.cluster.endpoints if one.id == EndpointId("b"))
        assert await warming_of(service).warmer.is_idle(endpoint)
        b.load = (7, 1)
        assert await warming_of(service).warmer.is_idle(endpoint)
        b.load = (7, 2)
        assert not await warming_of(service).warmer.is_idle(endpoint)
        b.load = IDLE
        endpoint.load.in_flight = 9
        assert not await warming_of(service).warmer.is_idle(endpoint)


async def test_a_long_prefix_goes_in_pieces() -> None:
    """Each begins with the one before, so that a request that comes meanwhile waits for one piece."""
    a, b = Engine(), Engine()
    long = long_text("s", PIECE_TOKENS + 500)
    async with warming(a, b, FakeClock()) as service:
        for session in range(5):
            await service.serve(chat(long, "yes", f"{session} " * 40, user=f"other {session}"), A)
            await service.settled()
        await rounds(service)
    pieces, whole = [len(prompt) for prompt in b.prompts[:-1]], len(b.prompts[-1])
    assert pieces == [PIECE_TOKENS, whole]
    assert whole > PIECE_TOKENS + 500


async def test_the_budget_bounds_what_is_sent() -> None:
    """It fills again with time."""
    clock, a, b = FakeClock(), Engine(), Engine()
    async with warming(a, b, clock, warming={"tokens_per_minute": 300}) as service:
        await rounds(service)
        clock.advance(3600.0)
        await rounds(service)
        assert b.prompts == []  # 400 tokens never fit into 300


async def test_the_budget_fills_in_a_minute() -> None:
    """A transfer takes its share until then: an engine that loses its cache again and again has a bounded one."""
    clock, a, b = FakeClock(), Engine(), Engine()
    async with warming(a, b, clock, warming={"uses_per_replica": 100, "tokens_per_minute": 600}) as service:
        for after_s, sent in ((0.0, 2), (20.0, 2), (60.0, 4)):
            clock.advance(after_s)
            service.kv.state.losses.note_loss("default", A, LossReason.RESTARTED)
            await rounds(service)
            assert len(a.prompts) == sent


async def test_failures_and_unverified_results_are_counted() -> None:
    """An error by its reason; an engine that reports no reuse is believed."""
    for b, result in ((Engine(status=500), "refused"), (Engine(says_cached=False), "unverified")):
        async with warming(Engine(), b, FakeClock()) as service:
            await rounds(service)
            assert done(service, result) == 1


async def test_a_dry_run_sends_nothing() -> None:
    """It is counted."""
    b = Engine()
    async with warming(Engine(), b, FakeClock(), cache_strategy={"dry_run": True}) as service:
        await rounds(service)
        assert (done(service, "dry_run"), b.prompts) == (1, [])


async def test_it_is_off_unless_asked_for() -> None:
    """And then keeps nothing of prompts."""
    async with world({"a": Engine().app}, kv_events=True) as service:
        assert service.kv.observers.find(Warming) is None
        await service.serve(chat(SYSTEM), A)
        assert len(service.kv.actions.hotness) == 0


def test_it_needs_kv_events() -> None:
    """Routing would not learn what was warmed."""
    warming = {"kv_events": False, "warming": {"enabled": True}}
    raw = {"endpoints": ["http://127.0.0.1:8000"], "filters": {"kvcache": warming}}
    config, problems = check_config(raw)
    assert config is None
    assert [one.path for one in problems if "needs kv_events" in one.message] == ["filters.kvcache.warming.enabled"]
