"""Actions to be done once: granted by their owner for a requested time."""

from __future__ import annotations

import asyncio

import pytest

from kvproxy.features.exchange import claims
from kvproxy.features.exchange.claims import owner_of
from tests.features.exchange.support import Bus, Node, pair

WHATS = [f"prefetch {number}" for number in range(12)]


async def ask(bus: Bus, node: Node, what: str, ttl_s: float) -> bool:
    """Over the bus where the owner is another."""
    asked = asyncio.create_task(node.claims.claim(what, ttl_s))
    await asyncio.sleep(0)
    bus.deliver()
    return await asked


async def test_a_claim_holds_for_its_time_and_no_longer() -> None:
    """Another gets it when that is over, whichever of them is its owner; its holder may have it again."""
    bus, one, two = pair()
    assert {owner_of(what, (one.origin, two.origin)) for what in WHATS} == {one.origin, two.origin}
    for what in WHATS:
        began = bus.now
        assert await ask(bus, one, what, 10.0)
        assert not await ask(bus, two, what, 10.0)
        bus.now = began + 9.9
        assert not await ask(bus, two, what, 10.0)
        bus.now = began + 10.0
        assert await ask(bus, two, what, 10.0)
        assert not await ask(bus, one, what, 10.0)
        assert await ask(bus, two, what, 10.0)


async def test_an_owner_is_asked_once_by_all_who_wait_for_its_answer() -> None:
    """Two that claim the same at the same time send one message, and both hear the answer."""
    bus, one, two = pair()
    what = next(what for what in WHATS if owner_of(what, (one.origin, two.origin)) == two.origin)
    asked = [asyncio.create_task(one.claims.claim(what, 10.0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(bus.waiting) == 1
    bus.deliver()
    assert await asyncio.gather(*asked) == [True, True]


async def test_an_owner_that_does_not_answer_grants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The action is considered again; an answer that comes too late is no answer to the next request."""
    bus, one, two = pair()
    what = next(what for what in WHATS if owner_of(what, (one.origin, two.origin)) == two.origin)
    monkeypatch.setattr(claims, "ANSWER_S", 0.001)
    assert not await one.claims.claim(what, 10.0)
    bus.deliver()
    assert not await ask(Bus(), one, what, 10.0)
    monkeypatch.setattr(claims, "ANSWER_S", 60.0)
    assert await ask(bus, one, what, 10.0)


async def test_an_owner_that_is_gone_is_owner_of_nothing() -> None:
    """Its claims fall to those who live."""
    bus, one, two = pair()
    what = next(what for what in WHATS if owner_of(what, (one.origin, two.origin)) == two.origin)
    two.peers.leave()
    bus.deliver()
    assert await one.claims.claim(what, 10.0)
    assert not bus.waiting
