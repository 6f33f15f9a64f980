"""One breaker an operation."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvproxy.base.errors import BreakerOpen, ClientTimeout, ClientUnavailable, NotSupported, Refused, UnknownInstance
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.model import BreakerSettings
from kvproxy.cache.breakers import OperationBreakers
from tests.support.clock import FakeClock

LIMITS = BreakerSettings(failure_threshold=2, recovery_timeout=10)


def guard(clock: FakeClock) -> OperationBreakers:
    return OperationBreakers(LIMITS, clock=clock, metrics=Metrics())


async def failing(error: Exception) -> None:
    raise error


async def fail(guard: OperationBreakers, operation: str, error: Exception, times: int = 2) -> None:
    for _ in range(times):
        with pytest.raises(type(error)):
            await guard.call(operation, lambda: failing(error))


async def test_no_answer_opens_the_breaker_of_that_operation_alone(clock: FakeClock) -> None:
    """Background failures never stop lookups, and the other way round."""
    under_test = guard(clock)
    await fail(under_test, "pin", ClientTimeout("no answer"))
    assert not under_test.admits("pin")
    assert under_test.admits("lookup")
    with pytest.raises(BreakerOpen):
        await under_test.call("pin", lambda: failing(ClientTimeout("never sent")))


async def test_a_refusal_of_what_was_asked_shows_life(clock: FakeClock) -> None:
    """4xx speaks of the request, not of the service."""
    under_test = guard(clock)
    await fail(under_test, "pin", Refused("no", status=422), times=5)
    assert under_test.admits("pin")


async def test_5xx_and_a_missing_route_count_against_it(clock: FakeClock) -> None:
    under_test = guard(clock)
    await fail(under_test, "pin", UnknownInstance("who", status=500))
    await fail(under_test, "evict", NotSupported("no route", status=404))
    assert not under_test.admits("pin")
    assert not under_test.admits("evict")


async def test_a_cancelled_call_counts_nothing(clock: FakeClock) -> None:
    """A caller that stopped waiting says nothing about the service; the half-open slot is free again."""
    under_test = guard(clock)
    await fail(under_test, "lookup", ClientUnavailable("gone"))
    clock.advance(10)
    hanging = [asyncio.create_task(under_test.call("lookup", asyncio.Event().wait)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not under_test.admits("lookup")
    hanging[0].cancel()
    await asyncio.gather(hanging[0], return_exceptions=True)
    assert under_test.admits("lookup")
    hanging[1].cancel()


async def test_an_unexpected_error_frees_the_probe_slot(clock: FakeClock) -> None:
    """A body that cannot be tokenized says nothing about the engine."""
    under_test = guard(clock)
    await fail(under_test, "tokenize", ClientUnavailable("gone"))
    clock.advance(10)
    await fail(under_test, "tokenize", ValueError("not a chat"), times=2)
    assert under_test.admits("tokenize")


async def test_a_success_closes_it_again(clock: FakeClock) -> None:
    under_test = guard(clock)
    await fail(under_test, "lookup", ClientUnavailable("gone"))
    clock.advance(10)

    async def fine() -> int:
        return 1

    assert await under_test.call("lookup", fine) == 1
    assert await under_test.call("lookup", fine) == 1


async def test_an_outage_is_logged_as_it_begins_and_as_it_ends(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with what it means, however often it is tried meanwhile; one line when it is over."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    under_test = guard(clock)
    await fail(under_test, "lookup", ClientUnavailable("lmcache controller /lookup: ConnectError"))
    for _ in range(3):
        clock.advance(10)
        await fail(under_test, "lookup", ClientTimeout("lmcache controller /lookup: no answer"), times=1)
    (outage,) = under_test.outages
    assert (outage.operation, outage.since, outage.last_error) == (
        "lookup",
        clock() - 30,
        "lmcache controller /lookup: no answer",
    )
    clock.advance(10)
    await under_test.call("lookup", succeeding)
    assert under_test.outages == ()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "[kvcache] lookup failed 2 times in a row (lmcache controller /lookup: ConnectError): requests are routed "
            "by the approximate index and KV events alone; it is tried again every 10 s",
        ),
        ("INFO", "[kvcache] lookup works again after 40 s"),
    ]


async def test_a_missing_call_is_no_outage(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """No controller has `/evict`."""
    under_test = guard(clock)
    await fail(under_test, "evict", NotSupported("no route", status=404))
    assert not under_test.admits("evict")
    assert under_test.outages == ()
    assert not caplog.records


async def succeeding() -> None:
    """Answer."""
