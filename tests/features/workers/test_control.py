"""A reload in halves, at a worker: what is prepared is taken into use or let go, whatever becomes of the supervisor."""

from __future__ import annotations

import pickle

import pytest

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError
from kvproxy.features.workers import control
from kvproxy.features.workers.assignment import Change
from kvproxy.features.workers.control import RELOAD
from kvproxy.operate.runtime.generation import Generation
from tests.features.workers.together import Together, together
from tests.support.until import until

ENDPOINTS = {"a": "http://127.0.0.1:9"}


def watch_discards(proxy: Proxy) -> list[Generation]:
    """Those it lets go from now on."""
    found: list[Generation] = []
    discard = proxy.generations.discard

    def watched(after: Generation) -> None:
        found.append(after)
        discard(after)

    proxy.generations.discard = watched  # type: ignore[method-assign]
    return found


async def prepare(both: Together, index: int) -> None:
    """One worker alone is asked for the first half."""
    asked = Change("POST", f"{RELOAD}/prepare", pickle.dumps(both.workers.config))
    answer = await both.workers.ask(both.workers.supervisor.slots[index], asked)
    assert answer is not None
    assert answer.is_success, answer.text


async def test_prepared_parts_are_released_if_another_refuses() -> None:
    """Its parts would run beside those that serve until the worker ends."""
    async with together(ENDPOINTS) as both:
        discarded = watch_discards(both.proxies[0])

        async def refuse(config: object) -> None:
            raise RuntimeError("no port left")

        both.proxies[1].generations.prepare = refuse  # type: ignore[method-assign,assignment]
        with pytest.raises(ConfigError, match="no port left"):
            await both.workers.reload(both.workers.config)
        assert len(discarded) == 1
        answer = await both.workers.ask(both.workers.supervisor.slots[0], Change("POST", f"{RELOAD}/adopt"))
        assert answer is not None
        assert answer.status_code == 409


async def test_of_two_that_are_prepared_the_first_is_let_go() -> None:
    """A supervisor that asks again means the later one."""
    async with together(ENDPOINTS) as both:
        discarded = watch_discards(both.proxies[0])
        await prepare(both, 0)
        assert not discarded
        await prepare(both, 0)
        assert len(discarded) == 1
        answer = await both.workers.ask(both.workers.supervisor.slots[0], Change("POST", f"{RELOAD}/adopt"))
        assert answer is not None
        assert answer.is_success
        assert both.proxies[0].generations.current is not discarded[0]


async def test_unclaimed_preparations_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor is gone, or was answered too late, in the middle of a reload."""
    monkeypatch.setattr(control, "FORGET_S", 0.01)
    async with together(ENDPOINTS) as both:
        discarded = watch_discards(both.proxies[0])
        await prepare(both, 0)
        await until(lambda: bool(discarded))


async def test_a_preparation_taken_into_use_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at once nor when the time to forget it has come."""
    monkeypatch.setattr(control, "FORGET_S", 0.2)
    async with together(ENDPOINTS, count=1) as one:
        (proxy,) = one.proxies
        discarded = watch_discards(proxy)
        await one.workers.reload(one.workers.config)
        adopted = proxy.generations.current
        await prepare(one, 0)
        await until(lambda: bool(discarded))
        assert adopted not in discarded
        assert proxy.generations.current is adopted
